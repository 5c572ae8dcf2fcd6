"""A store, or a part of it, as one file: a zip of digest-covered members with the KV inside as safetensors."""
