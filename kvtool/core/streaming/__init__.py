"""Fetching from a shared store under a time objective: the levels of chunks, the link's throughput, and the task."""
