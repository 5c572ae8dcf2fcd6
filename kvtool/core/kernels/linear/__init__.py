"""Linear layers: quantised matrices, their products in machine code, and weights in the layout of oneDNN."""
