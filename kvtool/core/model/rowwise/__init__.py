"""What a decoder layer does between its products, row by row, in machine code: norms, rotation, the MLP's gate."""
