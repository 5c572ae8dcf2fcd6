"""A store shared by several machines: its values as blobs in Redis or in a folder, and a local store in front."""
