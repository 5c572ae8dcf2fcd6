"""Chunks' KV from a slow link under a time objective: what to fetch next, and what that comes to over a trace."""
