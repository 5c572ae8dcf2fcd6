"""Measurements for people."""
