"""Encode chunks as records, and read them back with the coarser ones that they refine."""
