"""Entries: every value survives encoding, and invalid bytes are reported as damage."""

from __future__ import annotations

import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.cache import entries
from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.tables import StretchInfo
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import DamagedError
from tests.wording import refused

texts = st.text(st.characters(), max_size=60)  # surrogates, NUL and all
numbers = st.integers(0, 2**63)
refs = st.builds(ChunkRef, st.binary(min_size=20, max_size=20), numbers, numbers, numbers)


@given(texts, texts, texts, st.lists(refs, max_size=5))
def test_documents(source: str, kind: str, text: str, chunks: list[ChunkRef]) -> None:
    entry = DocumentEntry(source, kind, text * 20, tuple(chunks))
    assert DocumentEntry.from_bytes(entry.to_bytes()) == entry


@given(texts, numbers, st.integers(-(2**63), 2**63), texts, texts, st.lists(texts, max_size=3))
def test_files(path: str, size: int, mtime_ns: int, digest: str, settings: str, names: list[str]) -> None:
    entry = FileEntry(path, size, mtime_ns, digest, settings, tuple(names), tuple(names[:1]))
    assert FileEntry.from_bytes(memoryview(entry.to_bytes())) == entry


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.binary(max_size=30), st.integers(0, 200), st.booleans())
def test_chunks(ids: list[int], lead_in: bytes, layers: int, side: bool) -> None:
    info = ChunkInfo(tuple(ids), lead_in, layers, b"\1\2" * len(ids) if side else b"")
    assert ChunkInfo.from_bytes(info.to_bytes()) == info


def test_surrogate_pairs_stay_two() -> None:
    entry = DocumentEntry("\ud83d\ude00", "text", "\ud83d\ude00😀", ())
    assert DocumentEntry.from_bytes(entry.to_bytes()) == entry


def test_sensitivity_must_fit() -> None:
    with refused(ValueError):
        ChunkInfo((1, 2), b"", 1, b"abc")


@given(st.binary(max_size=100))
def test_any_bytes_are_damage(data: bytes) -> None:
    for kind in (DocumentEntry, FileEntry, ChunkInfo):
        try:
            kind.from_bytes(data)
        except DamagedError:
            continue
        assert kind is ChunkInfo
        assert ChunkInfo.from_bytes(data).to_bytes() == data


def test_every_cut_of_a_packed_document_is_damage() -> None:
    data = DocumentEntry("s", "text", "long " * 500, ()).to_bytes()
    assert len(data) < 500
    for cut in range(len(data)):
        with pytest.raises(DamagedError):
            DocumentEntry.from_bytes(data[:cut])


def test_a_bomb_is_refused_before_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_ENTRY_BYTES", 2**20)
    bomb = b"z" + zstandard.ZstdCompressor().compress(bytes(2**22))
    with pytest.raises(DamagedError):
        DocumentEntry.from_bytes(bomb)


WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}" * 1000)


@pytest.mark.parametrize("data", [b"z" + WITHOUT_SIZE, b"j" + b"[" * 100_000], ids=["frame without size", "deep JSON"])
def test_frames_without_size_and_deep_json_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        DocumentEntry.from_bytes(data)


INFO = StretchInfo(0, 7, (1,), (0,), (b"c" * 20,), True, 5, arithmetic=Arithmetic("bfloat16", "cuda"))


def test_what_computed_it_is_noted() -> None:
    assert StretchInfo.from_bytes(INFO.to_bytes()) == INFO


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": [70_000]},  # too large for a part's key
        {"states": [-1]},
        {"states": ["0"]},
        {"tokens": -7},
        {"start": 0.5},
        {"size": 2**70},
        {"size": True},
        {"chunks": ["ab"]},
        *({"arithmetic": made} for made in (["int4", "cpu"], ["bfloat16"], 7, None)),
    ],
    ids=str,
)
def test_impossible_fields_are_damage(changed: dict[str, object]) -> None:
    with pytest.raises(DamagedError):
        StretchInfo.from_bytes(json.dumps(json.loads(INFO.to_bytes()) | changed).encode())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rows": [Infinity]}', "7", "", "\0"], ids=lambda text: text[:9])
def test_what_is_no_description_is_damage(text: str) -> None:
    with pytest.raises(DamagedError):
        StretchInfo.from_bytes(text.encode())
