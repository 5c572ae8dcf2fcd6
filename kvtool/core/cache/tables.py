"""The tables of a store. One byte stands before every key: named databases would need a write transaction, and its
wait, just to be opened."""

from __future__ import annotations

META, FILES, DOCUMENTS, CHUNKS, LEVELS, RECORDS, USED, PROFILES, ADDED, STRETCHES, WARM, ORIGINS = TABLES = tuple(
    bytes([letter]) for letter in b"mfdclrupaswo"
)
_NAMES = "meta files documents chunks levels records used profiles added stretches warm origins".split()
TABLE_NAMES = dict(zip(TABLES, _NAMES, strict=True))
