"""Limits on the size of a shared store's values: a shared store cannot make a client read more.

They are far above what is ever written, and far below a machine's memory.
"""

from __future__ import annotations

MOST_BYTES = 2**30  # of any value
MOST_NAMES = 10**7  # that a place lists; one that goes on lists without an end
LEAST_RATE = 1024  # bytes a second, on average, of an answer that takes longer than the timeout
MOST_LAYERS = 1000
MOST_TOKENS = 2**22  # of a chunk
MOST_LEVEL_BYTES = 2**32  # a chunk's records of one level
_MOST = {"head": 2**12, "catalogue": 2**28, "shard": 2**26, "meta": 2**24, "chunk": 2**24}  # by what a name begins with


def most_bytes(name: str) -> int:
    """Return the largest size in bytes that a value of this name may have."""
    return _MOST.get(name.partition("/")[0], MOST_BYTES)
