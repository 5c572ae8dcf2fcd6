"""What is kept on disk: identity, records, the LMDB store."""
