"""Quality of an answer, and distance of one distribution from another."""
