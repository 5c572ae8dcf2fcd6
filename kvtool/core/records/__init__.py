"""A chunk's records: made from its token ids, and read back with the coarser ones that they refine."""
