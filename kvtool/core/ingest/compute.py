"""Prefill what is missing in batches, and hand it to the store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.progress import Events
from kvtool.core.ingest.commit import count_file
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.prepare import PreparedFile
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.making import LeadIns, PrefilledChunk, encode, prefill
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.identity import StoreIdentity

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
QUEUED = 4  # batches and commits that may wait to be written: bounds the memory they hold


def batch_tokens(device: str) -> int:
    """How many tokens are prefilled at once."""
    return BATCH_TOKENS.get(device.split(":")[0], BATCH_TOKENS["cpu"])


class ChunkStorer:
    """Computes chunks and writes them, in order.

    Beside a GPU's compute one thread writes. On the CPU writes take turns with the compute: a thread that holds one of
    the cores lets all others wait for their share of every matrix product, four times its own work (measured, 2 cores).
    """

    def __init__(
        self,
        decoder: Decoder,
        identity: StoreIdentity,
        writer: Writer,
        level: str,
        report: IngestReport,
        events: Events,
        lead_ins: LeadIns,
        profile: Profile | None = None,
    ) -> None:
        self._decoder, self._identity, self._writer = decoder, identity, writer
        self._level = level
        self._profile = profile
        self._report, self._events = report, events
        self._lead_ins = lead_ins
        self._pool = None if decoder.device == "cpu" else ThreadPoolExecutor(1, "kvtool-writer")
        self._pending: deque[Future[None]] = deque()
        self._batch_tokens = batch_tokens(decoder.device)

    def store_prefix(self) -> None:
        """Compute and keep the prompt's own beginning, which is exact in every prompt."""
        made = prefill(self._decoder, LeadIns.nothing(self._decoder), [self._identity.wanted_prefix])
        self._write(made, level_of(self._level).of_prefix)
        self.finish()

    def store(self, files: Sequence[PreparedFile], missing: dict[bytes, WantedChunk]) -> None:
        """Compute the missing chunks and commit each file as soon as all of its chunks are there."""
        waiting = _Waiting(files, missing)
        self._commit(waiting.complete)
        for batch in _batches(files, missing, self._batch_tokens):
            self._write(self._prefill(batch), self._level)
            self._commit(waiting.stored(batch))
        self.finish()

    def finish(self) -> None:
        """Wait until everything handed over is written; raise what went wrong there."""
        self._settle(0)

    def close(self) -> None:
        """Wait for the writing thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _prefill(self, batch: Sequence[WantedChunk]) -> list[PrefilledChunk]:
        started = time.perf_counter()
        made = prefill(self._decoder, self._lead_ins, batch)
        tokens = sum(len(chunk.ids) for chunk in batch)
        self._report.prefill_seconds += time.perf_counter() - started
        self._report.tokens += tokens
        self._report.chunks.computed += len(batch)
        self._events.advance(tokens)
        return made

    def _write(self, batch: Sequence[PrefilledChunk], level: str) -> None:
        def work() -> None:
            for made in batch:
                records = encode(made, level, self._profile)
                self._report.kv_bytes += sum(map(len, records.layers))
                self._writer.put_chunk(records.chunk_id, records.info, level, records.layers)

        self._submit(work)

    def _commit(self, files: Sequence[PreparedFile]) -> None:
        for file in files:
            self._submit(partial(self._writer.commit_file, file.entry, file.documents))
            count_file(file, self._report)

    def _submit(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            work()
            return
        self._settle(QUEUED - 1)
        self._pending.append(self._pool.submit(work))

    def _settle(self, left: int) -> None:
        """Wait until at most `left` pieces of work wait to be written. After a failure nothing more is written."""
        while len(self._pending) > left or (self._pending and self._pending[0].done()):
            try:
                self._pending.popleft().result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise


class _Waiting:
    """Files by the chunks they still wait for.

    Attributes
    ----------
    complete : files that wait for nothing from the start.
    """

    def __init__(self, files: Sequence[PreparedFile], missing: dict[bytes, WantedChunk]) -> None:
        self._files: dict[bytes, list[int]] = {}
        self._left: dict[int, int] = {}
        self._order = files
        self.complete: list[PreparedFile] = []
        for index, file in enumerate(files):
            needed = {chunk.chunk_id for chunk in file.chunks if chunk.chunk_id in missing}
            self._left[index] = len(needed)
            for chunk_id in needed:
                self._files.setdefault(chunk_id, []).append(index)
            if not needed:
                self.complete.append(file)

    def stored(self, batch: Sequence[WantedChunk]) -> list[PreparedFile]:
        """Files that are complete now that these chunks are stored, in order."""
        done = []
        for index in (index for chunk in batch for index in self._files.pop(chunk.chunk_id, [])):
            self._left[index] -= 1
            if not self._left[index]:
                done.append(index)
        return [self._order[index] for index in sorted(done)]


def _batches(
    files: Sequence[PreparedFile], missing: dict[bytes, WantedChunk], tokens: int
) -> Iterator[list[WantedChunk]]:
    """The missing chunks once each, in document order; a batch holds at most `tokens` tokens, or one longer chunk."""
    batch: list[WantedChunk] = []
    seen: set[bytes] = set()
    size = 0
    for chunk in (chunk for file in files for chunk in file.chunks):
        if chunk.chunk_id not in missing or chunk.chunk_id in seen:
            continue
        seen.add(chunk.chunk_id)
        length = len(chunk.ids) + len(chunk.before)
        if batch and size + length > tokens:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += length
    if batch:
        yield batch
