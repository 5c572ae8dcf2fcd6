"""Adapter to the modules of `transformers`: exact and slow, for families whose layers have no spec."""
