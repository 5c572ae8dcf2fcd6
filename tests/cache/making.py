"""Small chunks, records and stores for the tests of the store: deterministic, no model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.identity import chunk_id
from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer

LAYERS, TOKENS, HEADS, DIM = 2, 8, 2, 16
LEAD_IN = b"lead-in digest------"


def noise(label: str, size: int) -> bytes:
    """Return the same bytes for the same label, anywhere."""
    return hashlib.shake_128(label.encode("utf-8", "surrogatepass")).digest(size)


def ids_of(label: str, tokens: int = TOKENS) -> tuple[int, ...]:
    data = noise(label, 2 * tokens)
    return tuple(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))


def id_of(label: str, tokens: int = TOKENS) -> bytes:
    return chunk_id(namespace="", model_fingerprint="model", lead_in=LEAD_IN, token_ids=ids_of(label, tokens))


def header_of(layer: int = 0, level: str = "raw", tokens: int = TOKENS, dim: int = DIM) -> KVHeader:
    return KVHeader("bfloat16", HEADS, tokens, dim, dim, level, layer)


def payload_of(label: str, layer: int, level: str = "raw", dim: int = DIM) -> list[bytes]:
    half = HEADS * TOKENS * dim * 2
    return [noise(f"{label}/{level}/{layer}/{part}", half) for part in "kv"]


def records_of(label: str, level: str = "raw", dim: int = DIM) -> list[bytes]:
    return [
        encode_record(id_of(label), header_of(layer, level, dim=dim), payload_of(label, layer, level, dim))
        for layer in range(LAYERS)
    ]


def info_of(label: str) -> ChunkInfo:
    return ChunkInfo(ids_of(label), LEAD_IN, LAYERS)


def put(writer: Writer, label: str, level: str = "raw", dim: int = DIM) -> ChunkRef:
    writer.put_chunk(id_of(label), info_of(label), level, records_of(label, level, dim))
    return ChunkRef(id_of(label), 0, len(label), TOKENS)


def add_file(writer: Writer, path: str, labels: Sequence[str], dim: int = DIM) -> None:
    refs, start = list[ChunkRef](), 0
    for label in labels:
        refs.append(replace(put(writer, label, dim=dim), start=start, end=start + len(label)))
        start += len(label) + 1
    entry = FileEntry(path, 1, 2, "digest", "settings", (path,))
    writer.commit_file(entry, [DocumentEntry(path, "text", " ".join(labels), tuple(refs))])


def make_store(path: Path, files: int = 2, chunks: int = 2, dim: int = DIM) -> Path:
    with Store.create_or_open(path) as store, store.writer() as writer:
        writer.set_manifest({"model": "tiny"})
        for number in range(files):
            add_file(writer, f"f{number}", [f"f{number}.{chunk}" for chunk in range(chunks)], dim)
    return path


def check_file(store: Store, path: str, chunks: int = 2, dim: int = DIM) -> None:
    """Check that everything about a file of :func:`make_store` reads back, byte for byte."""
    document = store.document(path)
    assert store.file(path) is not None
    assert document is not None
    assert [ref.chunk_id for ref in document.chunks] == [id_of(f"{path}.{chunk}") for chunk in range(chunks)]
    for chunk in range(chunks):
        label = f"{path}.{chunk}"
        assert store.chunk_info(id_of(label)) == info_of(label)
        for layer in range(LAYERS):
            found = store.read_kv(id_of(label), "raw", layer)
            assert found is not None
            assert found[0] == header_of(layer, dim=dim)
            assert bytes(found[1]) == b"".join(payload_of(label, layer, dim=dim))
