"""Batches of chunks, computed and written."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.ingest.report import Account
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.encode import ChunkRecords, LeadIns, PrefilledChunk, encode, encoder_threads, prefill

QUEUED = 4  # writes of batches that may wait: limits their memory
WRITE_BYTES = 192 * 2**20  # of a transaction beside a GPU: a disk waits at the end of each
BATCH_TOKENS = {"cpu": 2048, "cuda": 16000}  # a power of two and what is between its chunks would pin twice as much


def batch_tokens(device: str) -> int:
    return BATCH_TOKENS.get(device.split(":")[0], BATCH_TOKENS["cpu"])


def batches(chunks: Iterable[ChunkSpec], most: int) -> Iterator[list[ChunkSpec]]:
    """Divide chunks into batches of at most so many tokens, with those before each chunk; one chunk may have more."""
    batch: list[ChunkSpec] = []
    tokens = 0
    for chunk in chunks:
        length = len(chunk.before) + len(chunk.ids)
        if batch and tokens + length > most:
            yield batch
            batch, tokens = [], 0
        batch.append(chunk)
        tokens += length
    if batch:
        yield batch


class Storer(ABC):
    def __init__(self, writer: Writer, account: Account, device: str) -> None:
        self._writer, self._account, self._max_tokens = writer, account, batch_tokens(device)

    @abstractmethod
    def store_prefix(self, prefix: ChunkSpec) -> None:
        """Compute and store the prompt's fixed beginning, which is exact in every prompt."""

    def store(self, chunks: Iterable[ChunkSpec], is_over: Callable[[], bool]) -> bool:
        """Compute and store chunks in order. Stop and return True if `is_over` after a batch."""
        stopped = False
        for batch in batches(chunks, self._max_tokens):
            self._compute(batch)
            if stopped := is_over():
                break
        self._finish()
        return stopped

    @abstractmethod
    def _compute(self, batch: Sequence[ChunkSpec]) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Wait until all that was computed is put."""

    @abstractmethod
    def close(self) -> None: ...

    def _count(self, batch: Sequence[ChunkSpec], seconds: float) -> None:
        report = self._account.report
        report.prefill_seconds += seconds
        report.tokens += sum(len(chunk.ids) for chunk in batch)
        report.chunks.computed += len(batch)

    def _put(self, made: Iterable[ChunkRecords], made_here: bool = False) -> None:
        for records in made:
            chunk = records.chunk_id, records.info, records.level, records.layers
            self._writer.put_chunk(*chunk, origin=HERE, made_here=made_here)
            self._account.report.kv_bytes += sum(map(len, records.layers))


class ChunkStorer(Storer):
    """Storer that computes batches in this process.

    On a GPU one thread writes during the compute. On the CPU writes and compute alternate: a thread that occupies a
    core delays every matrix product by four times its own work (measured, 2 cores).
    """

    def __init__(
        self, writer: Writer, account: Account, decoder: Decoder, lead_ins: LeadIns, level: str, profile: Profile | None
    ) -> None:
        super().__init__(writer, account, decoder.device)
        self._decoder, self._lead_ins, self._level, self._profile = decoder, lead_ins, level, profile
        self._pool = None if decoder.device == "cpu" else ThreadPoolExecutor(1, "kvtool-writer")
        if self._pool is not None:
            writer.batch_bytes = WRITE_BYTES
        self._encoders = encoder_threads()
        self._pending: deque[Future[None]] = deque()

    def store_prefix(self, prefix: ChunkSpec) -> None:
        with self._decoder.turns.turn():
            made = prefill(self._decoder, LeadIns.nothing(self._decoder), [prefix])
        self._write(made, level_of(self._level).of_prefix)
        self._finish()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._encoders.shutdown(wait=True)

    def _compute(self, batch: Sequence[ChunkSpec]) -> None:
        started = time.perf_counter()
        with self._decoder.turns.turn():  # of a served model, between two steps of the answers
            made = prefill(self._decoder, self._lead_ins, batch)
        self._count(batch, time.perf_counter() - started)
        self._write(made, self._level)
        self._account.computed(batch)

    def _write(self, batch: Sequence[PrefilledChunk], level: str) -> None:
        one = partial(encode, level=level, profile=self._profile, in_place=True)
        self._submit(lambda: self._put(self._encoders.map(one, batch), made_here=True))

    def _finish(self) -> None:
        self._settle(0)

    def _submit(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            work()
            return
        self._settle(QUEUED - 1)
        self._pending.append(self._pool.submit(work))

    def _settle(self, left: int) -> None:
        """Wait until at most `left` tasks are pending. After an error nothing more is written."""
        while len(self._pending) > left or (self._pending and self._pending[0].done()):
            try:
                self._pending.popleft().result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise
