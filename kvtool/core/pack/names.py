"""Names of a pack's members. They are those of a shared tier's blobs, but for KV: one member a chunk and level."""

from __future__ import annotations

from kvtool.core.remote.entries import Chunk

HEAD, CATALOGUE = "head", "catalogue"


def kv_member(key: str, chunk: Chunk, level: str) -> str:
    """The name of the member of a chunk at a level: all its layers, as safetensors."""
    return f"kv/{key}/{level}-{chunk.levels[level].mark}.safetensors"
