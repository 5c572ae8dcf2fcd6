"""Plugins of kvtool, as examples."""
