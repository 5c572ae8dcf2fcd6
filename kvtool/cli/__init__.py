"""One file per command: parse → call core → render."""
