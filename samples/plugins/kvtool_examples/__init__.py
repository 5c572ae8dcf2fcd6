"""Plugins of kvtool, as examples. This module is imported whenever kvtool runs, so it is tiny."""

ZSTD = {"codec": "kvtool_examples.zstd:Zstd", "lossless": True, "bits": 13.0}
