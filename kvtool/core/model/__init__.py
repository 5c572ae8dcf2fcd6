"""The language model: loading, prompt segments, rotary positions, the decoder driven layer by layer."""
