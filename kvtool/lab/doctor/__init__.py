"""Checks of `kvtool doctor`: the installation, the machine, the model, the store."""
