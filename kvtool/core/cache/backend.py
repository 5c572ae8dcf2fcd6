"""Protocol of a remote backend of a local store: a read fetches the records from it that the store lacks.

:attr:`Store.link` is one, or None for a store that is only a folder: callers test for that, never for a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtool.core.cache.record import Allocator, KVHeader
from kvtool.core.errors import KvtoolError

KVRead = tuple[KVHeader, memoryview]


class RecordReader(Protocol):
    """Protocol of a reader of chunks' KV: a store, with or without a remote backend."""

    def levels(self, chunk_id: bytes) -> list[str]:
        """Return the levels of which all layers can be read."""
        ...

    def read_layer(
        self,
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None] = ...,
        allocate: Allocator = ...,
    ) -> list[KVRead | KvtoolError | None]:
        """Read one layer of many chunks; for each its header and payload, None, or its error.

        Payloads are private, writable, 64-byte aligned; `before` is called with each chunk's number before its record
        is read; `allocate` allocates memory for large records.
        """
        ...


class Offer(Protocol):
    """A level of a chunk that a link has: bytes of its records, the level that it refines, the profile it names."""

    @property
    def size(self) -> int: ...

    @property
    def base(self) -> str | None: ...

    @property
    def maker(self) -> str | None: ...


class BlobRequest(NamedTuple):
    """Request for a value: one of its own, or a part of a pack.

    Attributes
    ----------
    name : what it is.
    most : bytes that it may have; a part of a pack has just so many.
    pack : the value that it is a part of, from byte `start` on; "": none.
    """

    name: str
    most: int
    pack: str = ""
    start: int = 0


@dataclass(frozen=True, slots=True)
class BlobResponse:
    """Response to a request: the value, None if no value has its name; `at` is its arrival (`perf_counter`)."""

    name: str
    value: bytes | None
    at: float


class Stream(Protocol):
    """Values of a link, in the order in which they were asked for.

    Attributes
    ----------
    url : the link's, for people.
    alive : nothing has gone wrong so far.
    """

    url: str
    alive: bool

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        """Ask for some more; never waits."""
        ...

    def take(self, timeout: float) -> BlobResponse:
        """Wait for the next one, for so many seconds; raises RemoteError."""
        ...

    def close(self) -> None:
        """Give up what has not come."""
        ...


class RemoteBackend(Protocol):
    """Protocol of a remote backend of a store. After a failure it offers nothing more.

    Attributes
    ----------
    timeout : seconds to wait for a value.
    """

    timeout: float

    def offers(self, chunk_id: bytes) -> Mapping[str, Offer]:
        """Return the levels that the link has of a chunk."""
        ...

    def complete(
        self,
        reads: list[KVRead | KvtoolError | None],
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None],
    ) -> None:
        """Fetch what a read of the local store did not find, and put it into its place in `reads`."""
        ...

    def keep_fetched(self) -> None:
        """Write what was fetched into the local store, as far as it fits."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...

    # ---- fetching ahead of the reads (core/query/streaming) ----

    def is_here(self, chunk_id: bytes, level: str) -> bool:
        """Return True if a read of a chunk at a level needs no fetching."""
        ...

    def wanted(self, chunk_id: bytes, level: str) -> list[BlobRequest]:
        """Return the requests for the records of a level, layer by layer; empty if the level is not offered."""
        ...

    def arrivals(self) -> Stream:
        """Return a stream of values; raises RemoteError where the remote store cannot be reached."""
        ...

    def keep(self, place: tuple[bytes, str], layer: int, value: bytes | None) -> bool:
        """Hold a record that came, to be read now and written afterwards. False: it is missing or wrong."""
        ...

    def give_up(self, error: KvtoolError) -> None:
        """Send no further requests."""
        ...
