"""Fuse the KV of cached chunks into one prompt cache: plan, selectors, recompute engine, loader."""
