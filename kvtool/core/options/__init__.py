"""The machinery of options: how one is declared and checked, and which of flag, variable and file decides."""
