"""What a language model's agent is given of a store: tools and resources of the Model Context Protocol."""
