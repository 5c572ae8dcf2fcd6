"""Keeping a store in shape: what may go, in which order, and how it goes. Plans are pure; `apply` carries them out."""
