"""Counts and reads for the tests of compression that bypass the code that they test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache import tables
from kvtool.core.cache.record import decode_record, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.record import Record
from kvtool.core.common.types import Events
from kvtool.core.compress import job
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions, CompressReport
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.records.read import read_chunk
from kvtool.core.session.identity import MeasuredLosses, ProfileCache, store_identity
from tests.cli.working import CHUNKS, LAYERS, PREFIX, damages, flip_row, kvtool, write_corpus
from tests.cli.working import prefix_chunk as prefix_of

__all__ = ["LAYERS", "damages", "prefix_of"]

LOSSES = {"1": 0.001, "2": 0.004, "3": 0.02, "4": 0.05}  # what `fixed_losses` measures


def run(path: Path, *levels: str, events: Events | None = None, **options: Any) -> CompressReport:
    """Compress without measuring, which is most of the time of such a small store."""
    options = {"questions": 0, "yes": True, "fit_prompts": 4} | options
    return compress(path, CompressOptions(levels=levels, **options), events)


def chunks_in(path: Path) -> list[str]:
    """Ids of all chunks but the prompt's own beginning."""
    with Store.open(path) as store:
        prefix = store_identity(store).prefix_id
        return [chunk.hex() for chunk in store.chunk_ids() if chunk != prefix]


def levels_in(path: Path) -> dict[str, list[str]]:
    with Store.open(path) as store:
        return {chunk.hex(): store.levels(chunk) for chunk in store.chunk_ids()}


def rows(path: Path, level: str) -> dict[tuple[str, int], bytes]:
    found = {}
    with Store.open(path) as store, store.snapshot() as snapshot:
        for key, data in snapshot.items(tables.RECORDS):
            chunk, own, layer = tables.split_record_key(key)
            if own == level:
                found[chunk.hex(), layer] = bytes(data)
    return found


def coded_in(path: Path, level: str) -> dict[tuple[str, int], Record]:
    return {
        (chunk, layer): Record.parse(decode_record(bytes.fromhex(chunk), data)[1])
        for (chunk, layer), data in rows(path, level).items()
    }


def state_of(path: Path) -> dict[str, Any]:
    with Store.open(path) as store:
        return store.codec_state()


def losses_of(path: Path, chunk: str) -> dict[str, float]:
    with Store.open(path) as store:
        return MeasuredLosses(store).of(bytes.fromhex(chunk), store.levels(bytes.fromhex(chunk)))


def decoded(path: Path, chunk: str, level: str) -> ChunkKV:
    with Store.open(path) as store:
        layers = store.chunk_info(bytes.fromhex(chunk)).layers
        return read_chunk(store, bytes.fromhex(chunk), level, layers, ProfileCache(store))


def error_of(path: Path, chunk: str, level: str) -> float:
    exact, made = decoded(path, chunk, "raw"), decoded(path, chunk, level)
    found = []
    for side, other in ((exact.keys, made.keys), (exact.values, made.values)):
        for one, two in zip(side, other, strict=True):
            found.append(float((two - one).norm() / one.norm()))
    return sum(found) / len(found)


def check_sound(path: Path) -> None:
    """Nothing is damaged, and every level of every chunk decodes to what its records state."""
    assert damages(path) == []
    for chunk, levels in levels_in(path).items():
        for level in levels:
            kv = decoded(path, chunk, level)
            assert all(torch.isfinite(side).all() for sides in kv.layers for side in sides)
            if level in NESTED and "raw" in levels:
                assert error_of(path, chunk, level) < 0.5


def replace_record(path: Path, chunk: str, level: str, layer: int, change: Callable[[bytearray], None]) -> None:
    """Overwrite a stored record's bytes, which no writer does."""
    key = tables.record_key(bytes.fromhex(chunk), level, layer)
    data = bytearray(rows(path, level)[chunk, layer])
    change(data)
    with Store.open(path) as store:
        store.environment.write(lambda transaction: transaction.put(tables.RECORDS + key, bytes(data)), 0)


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 4


def drop_profile(path: Path) -> None:
    digest = bytes.fromhex(state_of(path)["profile"])
    with Store.open(path) as store:
        store.environment.write(lambda transaction: transaction.delete(tables.PROFILES + digest), 0)


def damage_profile(path: Path) -> None:
    flip_row(path, tables.PROFILES, bytes.fromhex(state_of(path)["profile"]))


def drop(path: Path, level: str, *chunks: str) -> None:
    with Store.open(path) as store, store.writer() as writer:
        writer.drop_level([bytes.fromhex(chunk) for chunk in chunks or chunks_in(path)], level)


def spoil(path: Path, chunk: str, level: str, layer: int, at: int = -1) -> None:
    """Write another payload under a right digest: only the codec can detect it."""
    header, payload = decode_record(bytes.fromhex(chunk), rows(path, level)[chunk, layer])
    changed = bytearray(payload)
    changed[at] ^= 0xFF
    key = tables.record_key(bytes.fromhex(chunk), level, layer)
    data = encode_record(bytes.fromhex(chunk), header, [changed])
    with Store.open(path) as store:
        store.environment.write(lambda transaction: transaction.put(tables.RECORDS + key, data), 0)


def make_plain(tiny: Path, folder: Path, documents: int = 2, paragraphs: int = 4) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        write_corpus(folder / "in", documents, paragraphs)
        kvtool("ingest", folder / "in", "--store", folder / "store", "--model", tiny, *CHUNKS, *PREFIX).fine()
    return folder / "store"


def make_fitted(plain: Path, folder: Path) -> Path:
    store = Path(shutil.copytree(plain, folder / "store"))
    run(store, *NESTED, fit=True)
    return store


def refit(path: Path, *levels: str, **options: Any) -> CompressReport:
    """Fit another profile: on fewer prompts."""
    return run(path, *levels, fit=True, fit_prompts=3, **options)


def fixed_losses(monkeypatch: pytest.MonkeyPatch, losses: dict[str, float] = LOSSES) -> list[list[str]]:
    """Measure these losses instead; returns which schemes are asked for, a list for each question."""
    asked: list[list[str]] = []

    def measure(session: Any, question: Any, schemes: Sequence[str]) -> dict[str, Any]:
        asked.append(list(schemes))
        return {level: {"kl_first": losses[level], "kl_answer": losses[level], "top1_agrees": 1.0} for level in schemes}

    monkeypatch.setattr(job, "measure", measure)
    return asked
