"""A store with its model: identity, lead-in, gate, levels, speeds."""
