"""Storage of the cache on disk: identity, records, the LMDB store.

Start at :class:`kvtool.core.cache.store.Store`. Bytes in, bytes out: nothing here knows tensors or models.
"""
