"""Prefill what is missing in batches of similar length, and hand it to the store while the next batch computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.identity import StoreIdentity
from kvtool.core.ingest.commit import count_file
from kvtool.core.ingest.prepare import PreparedFile, WantedChunk
from kvtool.core.ingest.report import Events, IngestReport
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks

BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
WINDOW_BATCHES = 4  # chunks are sorted by length within so many batches: little padding, documents complete soon


class ChunkStorer:
    """Computes chunks and writes them. Writes run in one thread beside the compute, in order."""

    def __init__(
        self,
        decoder: Decoder,
        identity: StoreIdentity,
        writer: Writer,
        level: str,
        report: IngestReport,
        events: Events,
    ) -> None:
        self._decoder, self._identity, self._writer = decoder, identity, writer
        self._codec = CODECS[level]
        self._report, self._events = report, events
        self._lead_ins: dict[tuple[int, ...], LeadIn] = {}
        self._pool = ThreadPoolExecutor(1, "kvtool-writer")
        self._pending: Future[None] | None = None
        self._batch_tokens = BATCH_TOKENS.get(decoder.device.split(":")[0], BATCH_TOKENS["cpu"])

    def store_prefix(self) -> None:
        """Compute and keep the prompt's own beginning."""
        from kvtool.core.cache.identity import ids_digest

        ids = self._identity.prefix
        wanted = WantedChunk(self._identity.prefix_id, ids, (), ids_digest([]))
        kv = prefill_chunks(self._decoder, LeadIn(self._decoder, ()), [PrefillItem(ids)])
        self._write([wanted], kv)
        self.finish()

    def store(self, files: Sequence[PreparedFile], missing: dict[bytes, WantedChunk]) -> None:
        """Compute the missing chunks and commit each file as soon as all of its chunks are there."""
        waiting = list(files)
        done: set[bytes] = set()
        for window in _windows(files, missing, self._batch_tokens * WINDOW_BATCHES):
            for batch in _batches(window, self._batch_tokens):
                self._write(batch, self._prefill(batch))
                done.update(chunk.chunk_id for chunk in batch)
                waiting = self._commit_complete(waiting, done, missing)
        self._commit_complete(waiting, done, missing)
        self.finish()

    def finish(self) -> None:
        """Wait until everything handed over is written; raise what went wrong there."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for the writing thread."""
        self._pool.shutdown(wait=True)

    def _prefill(self, batch: Sequence[WantedChunk]) -> list[ChunkKV]:
        started = time.perf_counter()
        ids = self._identity.lead_in.ids
        lead_in = self._lead_ins.get(ids)
        if lead_in is None:
            lead_in = self._lead_ins[ids] = LeadIn(self._decoder, ids)
        kvs = prefill_chunks(self._decoder, lead_in, [PrefillItem(chunk.ids, chunk.before) for chunk in batch])
        tokens = sum(len(chunk.ids) for chunk in batch)
        self._report.prefill_seconds += time.perf_counter() - started
        self._report.tokens += tokens
        self._report.chunks.computed += len(batch)
        self._events.advance(tokens)
        return kvs

    def _write(self, batch: Sequence[WantedChunk], kvs: Sequence[ChunkKV]) -> None:
        def work() -> None:
            for chunk, kv in zip(batch, kvs, strict=True):
                layers = encode_chunk(chunk.chunk_id, kv, self._codec.level)
                self._report.kv_bytes += sum(map(len, layers))
                self._writer.put_chunk(chunk.chunk_id, chunk.info(len(layers)), self._codec.level, layers)

        self._submit(work)

    def _commit_complete(
        self, waiting: list[PreparedFile], done: set[bytes], missing: dict[bytes, WantedChunk]
    ) -> list[PreparedFile]:
        left = []
        for file in waiting:
            if all(chunk.chunk_id in done or chunk.chunk_id not in missing for chunk in file.chunks):
                self._submit(partial(self._writer.commit_file, file.entry, file.documents))
                count_file(file, self._report)
            else:
                left.append(file)
        return left

    def _submit(self, work: Callable[[], None]) -> None:
        self.finish()
        self._pending = self._pool.submit(work)


def encode_chunk(chunk_id: bytes, kv: ChunkKV, level: str) -> list[bytes]:
    """A chunk's records, one a layer."""
    from kvtool.core.codec.raw import NAMES

    codec = CODECS[level]
    layers, kv_heads, tokens, head_dim = kv.keys.shape
    return [
        encode_record(
            chunk_id,
            KVHeader(NAMES[kv.keys.dtype], kv_heads, tokens, head_dim, head_dim, level, layer),
            codec.encode(kv.keys[layer], kv.values[layer]),
        )
        for layer in range(layers)
    ]


def _windows(
    files: Sequence[PreparedFile], missing: dict[bytes, WantedChunk], tokens: int
) -> Iterator[list[WantedChunk]]:
    """The missing chunks once each, in document order, about `tokens` at a time."""
    window: list[WantedChunk] = []
    seen: set[bytes] = set()
    size = 0
    for chunk in (chunk for file in files for chunk in file.chunks):
        if chunk.chunk_id in missing and chunk.chunk_id not in seen:
            seen.add(chunk.chunk_id)
            window.append(chunk)
            size += len(chunk.ids) + len(chunk.before)
            if size >= tokens:
                yield window
                window, size = [], 0
    if window:
        yield window


def _batches(window: list[WantedChunk], tokens: int) -> Iterator[list[WantedChunk]]:
    """Similar lengths together; a batch holds at most `tokens` padded tokens, or one longer chunk."""
    batch: list[WantedChunk] = []
    for chunk in sorted(window, key=lambda chunk: (len(chunk.ids) + len(chunk.before), chunk.chunk_id)):
        length = len(chunk.ids) + len(chunk.before)
        if batch and length * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
