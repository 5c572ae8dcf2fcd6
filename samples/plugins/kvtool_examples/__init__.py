"""Plugins of kvtool, as examples. What stands here is imported whenever kvtool runs, so it is next to nothing."""

ZSTD = {"codec": "kvtool_examples.zstd:Zstd", "lossless": True, "bits": 13.0}
