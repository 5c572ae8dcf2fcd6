"""Checkpoints of models: finding, fingerprints, checks, conversion and loading. Never imports `kvtool/core/model`."""
