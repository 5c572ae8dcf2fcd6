"""Entropy coding of symbols as 16-bit words: interleaved rANS over shared frequency tables."""
