"""Language model: its layers one by one, rotary positions, decoding, and the parts of a prompt."""
