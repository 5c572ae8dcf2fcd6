"""Helpers for every room: places, times, sizes, processes; no kvtool knowledge."""
