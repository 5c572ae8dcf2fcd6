"""What can be set, declared once and resolved from flags, variables and files."""
