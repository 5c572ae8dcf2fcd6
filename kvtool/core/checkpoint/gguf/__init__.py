"""GGUF files, converted once into a folder that `transformers` loads."""
