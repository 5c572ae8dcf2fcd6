"""Streaming over a simulated link."""
