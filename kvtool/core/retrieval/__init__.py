"""Question → ranked chunks."""
