"""Ingest compared with plain batched prefill of the same chunks, tokens a second."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvtool.core.cache.entries import ChunkRef, DocumentEntry, FileEntry
from kvtool.core.common.types import Events
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.identity import LeadInIds, StoreIdentity
from samples.benchmarks.bench.ingest import bench_ingest
from samples.benchmarks.gpu_day import shapes
from samples.benchmarks.gpu_day.day import Day

_FILES, _CHUNKS = 8, 16


def run(day: Day) -> None:
    for shape in shapes.shapes(day):
        for tokens in (24,) if day.dry else (256, 512):
            day.step(
                f"{shape}, chunks of {tokens}", partial(_measured, day, shape, tokens), least_s=2 if day.dry else 40
            )


def _measured(day: Day, shape: str, tokens: int) -> dict[str, Any]:
    decoder = shapes.decoder(day, shape)
    identity = _identity(decoder)
    count = (1, 2) if day.dry else (_FILES, _CHUNKS)
    files = [_file(identity, decoder.config.vocab_size, number, count[1], tokens) for number in range(count[0])]
    return bench_ingest(decoder, identity, files, 1 if day.dry else 3, Events())


def _identity(decoder: Decoder) -> StoreIdentity:
    """Return the identity of a store whose lead-in is random tokens, as many as a real one has."""
    ids = _random(decoder.config.vocab_size, 64, 7)
    lead_in = LeadInIds("prefix", ids)
    fingerprint, dtype = decoder.loaded.fingerprint, decoder.loaded.dtype
    return StoreIdentity("shape", fingerprint, dtype, ids, (), lead_in, SplitSettings())


def _file(identity: StoreIdentity, vocabulary: int, number: int, chunks: int, tokens: int) -> PreparedFile:
    """A file of one document, of chunks of a few lengths."""
    wanted = tuple(
        identity.wanted(_random(vocabulary, tokens - 7 * (chunk % 4), 1000 * number + chunk)) for chunk in range(chunks)
    )
    source = f"file-{number}"
    refs = tuple(ChunkRef(chunk.chunk_id, at, at + 1, len(chunk.ids)) for at, chunk in enumerate(wanted))
    document = DocumentEntry(source, "text", "x" * len(refs), refs)
    return PreparedFile(FileEntry(source, 0, 0, "", "", (source,)), (document,), wanted, is_new=True)


def _random(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())
