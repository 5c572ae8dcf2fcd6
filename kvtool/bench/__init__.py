"""Measurements of `kvtool bench` on this machine, next to plain `transformers` in the same run."""
