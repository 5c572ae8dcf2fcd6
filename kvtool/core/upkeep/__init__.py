"""Upkeep of a store: what may be dropped, in which order, and how. Plans are pure; `apply` carries them out."""
