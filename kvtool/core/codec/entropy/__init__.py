"""Symbols ⇄ words: interleaved rANS over shared tables of frequencies."""
