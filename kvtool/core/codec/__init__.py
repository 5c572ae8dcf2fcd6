"""KV tensor ⇄ bytes."""
