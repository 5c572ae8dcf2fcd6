"""Upkeep of a store: what may be removed, in which order, and how."""
