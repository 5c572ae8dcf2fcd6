"""A stream of prepared files: what they lack is put into batches, and each file is committed as soon as it is whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.errors import UsageError
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.prepare import PreparedFile

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def batch_tokens(device: str) -> int:
    """Tell how many tokens are prefilled at once."""
    return BATCH_TOKENS.get(device.split(":")[0], BATCH_TOKENS["cpu"])


@dataclass(slots=True)
class _Waiting:
    """Counts how many chunks a file still waits for; `number` is its place in the order of files."""

    number: int
    file: PreparedFile
    chunks: int


@dataclass(slots=True)
class Batch:
    """Holds chunks that are computed together; `tokens` with what is before each."""

    chunks: list[ChunkSpec]
    tokens: int = 0


class Storer(ABC):
    """Takes files one by one; holds those whose chunks wait for a batch to be full.

    Parameters
    ----------
    device : where batches are computed, which tells how large they are.
    context, lead_in : how many tokens the model takes, and how many of them stand before every chunk.
    """

    def __init__(self, account: Account, device: str, context: int, lead_in: int) -> None:
        self._account, self._most_tokens = account, batch_tokens(device)
        self._context, self._lead_in = context, lead_in
        self._batch = Batch([])
        self._waiting: dict[bytes, list[_Waiting]] = {}
        self._taken = 0

    @abstractmethod
    def store_prefix(self, prefix: ChunkSpec) -> None:
        """Compute and keep the prompt's own beginning, which is exact in every prompt."""

    @abstractmethod
    def _compute(self, batch: Batch) -> None:
        """Have a batch computed and written; :meth:`_is_there` is told when it is."""

    @abstractmethod
    def _commit(self, file: PreparedFile) -> None:
        """Commit a file whose chunks are all written."""

    @abstractmethod
    def close(self) -> None:
        """Give up what was not finished, and wait for what works for this run."""

    def check_length(self, chunks: Sequence[ChunkSpec]) -> None:
        """Refuse chunks of which the model cannot hold the longest behind the lead-in. Raises UsageError."""
        longest = max((len(chunk.before) + len(chunk.ids) for chunk in chunks), default=0)
        if self._lead_in + longest > self._context:
            raise UsageError(
                f"a chunk and its lead-in have {self._lead_in + longest} tokens, the model takes {self._context}",
                "use a shorter --lead-in or fewer --chunk-tokens",
            )

    def take(self, file: PreparedFile, missing: Sequence[ChunkSpec]) -> None:
        """Take in a file with those of its chunks that are new; they are computed as soon as they fill a batch."""
        self._taken += 1
        self._waiting.update((chunk.chunk_id, []) for chunk in missing)
        lists = [self._waiting[key] for key in {chunk.chunk_id for chunk in file.chunks} & self._waiting.keys()]
        waiting = _Waiting(self._taken, file, len(lists))
        for files in lists:
            files.append(waiting)
        if not lists:
            self._commit_all([waiting])
        for chunk in missing:
            self._queue(chunk)

    def finish(self) -> None:
        """Have the rest computed, and wait until all is written; raise what went wrong there."""
        self._hand_over()

    def _queue(self, chunk: ChunkSpec) -> None:
        length = len(chunk.before) + len(chunk.ids)
        if self._batch.tokens + length > self._most_tokens:
            self._hand_over()
        self._batch.chunks.append(chunk)
        self._batch.tokens += length

    def _spanning(self, batch: Batch) -> list[PreparedFile]:
        """List the files of a batch that need other chunks, too: they are unfinished once it is written."""
        files: dict[str, tuple[_Waiting, int]] = {}
        for waiting in (waiting for chunk in batch.chunks for waiting in self._waiting[chunk.chunk_id]):
            files[waiting.file.entry.path] = waiting, files.get(waiting.file.entry.path, (waiting, 0))[1] + 1
        return [waiting.file for waiting, here in files.values() if waiting.chunks > here]

    def _hand_over(self) -> None:
        if self._batch.chunks:
            batch, self._batch = self._batch, Batch([])
            self._compute(batch)

    def _is_there(self, batch: Batch) -> None:
        """Commit the files that waited for nothing else, in their order."""
        self._account.computed(batch.chunks)
        whole = []
        for waiting in (waiting for chunk in batch.chunks for waiting in self._waiting.pop(chunk.chunk_id)):
            waiting.chunks -= 1
            if not waiting.chunks:
                whole.append(waiting)
        self._commit_all(sorted(whole, key=lambda waiting: waiting.number))

    def _commit_all(self, whole: Sequence[_Waiting]) -> None:
        for waiting in whole:
            self._commit(waiting.file)
            self._account.count_file(waiting.file)
