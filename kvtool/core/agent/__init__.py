"""Model Context Protocol: tools and resources by which a language model's agent reads a store."""
