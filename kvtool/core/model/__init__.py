"""The language model: prompt segments, rotary positions, the decoder driven layer by layer."""
