"""What is learned from a store's own chunks."""
