"""Measurements of answers, of caches, of attention; the reports show them."""
