"""GGUF files: a folder of settings and tokenizer that `transformers` loads, and weights read from the file."""
