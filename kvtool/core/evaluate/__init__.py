"""How good an answer is, and how far one distribution is from another."""
