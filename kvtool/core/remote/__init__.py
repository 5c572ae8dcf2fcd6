"""A store shared by several machines: its values as blobs in Redis, a bucket or a folder, and a local cache."""
