"""Weights as few bits with a scale for each group of columns, as GGUF files keep them, and what computes with them."""
