"""Attention: parameters, the ordered list of backends (dispatch.py), and one file a backend."""
