"""What is measured: of answers, of caches, of attention; the reports tell it."""
