"""Work done by workers of Ray: starting, feeding and replacing them, whatever it is that they do."""
