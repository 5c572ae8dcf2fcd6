"""Checkpoints of models: found, named, checked, converted and loaded. Never imports `kvtool/core/model`."""
