"""Kernels of a decoder layer: what is computed of each row between its matrix products and attention."""
