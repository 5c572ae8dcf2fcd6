"""Commands, one file each: parse → call core → render."""
