"""Fused decoder layers on a CPU: norms, rotation and the gate of an MLP, row by row in machine code."""
