"""What `samples/limits.py` measures: a question's caches with the truth put back in pieces."""
