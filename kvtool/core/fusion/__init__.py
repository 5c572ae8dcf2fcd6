"""Chunk KVs → one prompt cache: plan, selectors, recompute engine, loader."""
