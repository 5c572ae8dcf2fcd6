"""Protocol of a remote backend of a local store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtool.core.cache.record import KVHeader
from kvtool.core.errors import KvtoolError

KVRead = tuple[KVHeader, memoryview]


class Offer(Protocol):
    """A level of a chunk in the remote store: bytes of its records, the level that it refines, the profile it names."""

    @property
    def size(self) -> int: ...

    @property
    def base(self) -> str | None: ...

    @property
    def maker(self) -> str | None: ...


class BlobRequest(NamedTuple):
    """Request for a value of at most `most` bytes, or for exactly so many bytes of the value `pack` from `start` on."""

    name: str
    most: int
    pack: str = ""
    start: int = 0


@dataclass(frozen=True, slots=True)
class BlobResponse:
    """Response to a request; `value` is None if no value has this name, `at` its arrival (`perf_counter`)."""

    name: str
    value: bytes | None
    at: float


class Stream(Protocol):
    """Values of a remote store, in the order of their requests. `alive`: nothing has failed so far."""

    url: str
    alive: bool

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        """Request more values; never waits."""

    def take(self, timeout: float) -> BlobResponse:
        """Wait for the next value, at most `timeout` seconds. Raises RemoteError."""

    def close(self) -> None: ...


class RemoteBackend(Protocol):
    """Remote backend of a local store: a read fetches the records from it that the store lacks; after a failure it
    offers nothing more. `timeout`: seconds to wait for a value. Callers test whether :attr:`ChunkReader.link` is one or
    None, never for a class."""

    timeout: float

    def offers(self, chunk_id: bytes) -> Mapping[str, Offer]: ...

    def complete(
        self,
        reads: list[KVRead | KvtoolError | None],
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None],
    ) -> None:
        """Fetch the records that a read of the local store did not find into their places in `reads`."""

    def keep_fetched(self) -> None: ...

    def close(self) -> None: ...

    def is_here(self, chunk_id: bytes, level: str) -> bool:
        """True if a read of a chunk at a level needs no fetching."""

    def wanted(self, chunk_id: bytes, level: str) -> list[BlobRequest]:
        """Requests for the records of a level, layer by layer; empty if the level is not offered."""

    def arrivals(self) -> Stream:
        """Open a stream of values. Raises RemoteError."""

    def keep(self, place: tuple[bytes, str], layer: int, value: bytes | None) -> bool:
        """Hold a fetched record, to be read now and written later. False: it is missing or wrong."""

    def give_up(self, error: KvtoolError) -> None: ...
