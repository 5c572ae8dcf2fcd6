"""Between a layer's sides (its keys, its values) and whole numbers: the transform's products, in machine code."""
