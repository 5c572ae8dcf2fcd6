"""Prefetching of a shared store's values by a thread; values that belong together come whole or not at all."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvtool.core.cache.backend import BlobRequest, BlobResponse
from kvtool.core.errors import KvtoolError, RemoteError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Readable, Reader

_T = TypeVar("_T")
_AHEAD = 4  # groups that are asked for before the first is there


@dataclass(frozen=True, slots=True)
class Group:
    """Values that are fetched all or not at all: of the file or chunk `key` (in hex; `what` for people), of at most
    `most` bytes together. Records of a chunk are of its `levels` in this order; `replaces`: they replace the stored
    ones."""

    key: str
    what: str
    wanted: Sequence[BlobRequest]
    most: int
    levels: tuple[str, ...] = ()
    replaces: bool = False


def fetch_groups(
    blobs: Readable, groups: Iterable[Group], timeout: float, damaged: Callable[[str, str], None], at_once: int = 1
) -> Iterator[tuple[Group, list[bytes]]]:
    """Fetch groups over one stream, so many at once: neighbours in a pack share one request. Yield those whose values
    all arrived, each sound in itself and within `timeout` seconds. `damaged` is called with what is missing, damaged or
    larger than it may be, and why. Raises RemoteError."""
    stream = Prefetcher(blobs)
    waiting, left = deque[Group](), iter(groups)
    try:
        while some := list(islice(left, at_once)):
            stream.ask([wanted for group in some for wanted in group.wanted])
            waiting.extend(some)
            while len(waiting) > _AHEAD * at_once:
                yield from _taken(stream, waiting.popleft(), timeout, damaged)
        for group in waiting:
            yield from _taken(stream, group, timeout, damaged)
    finally:
        stream.close()


def _taken(
    stream: Prefetcher, group: Group, timeout: float, damaged: Callable[[str, str], None]
) -> Iterator[tuple[Group, list[bytes]]]:
    """Take all values, since they are on their way; hold nothing of a group that is not whole."""
    whole: list[bytes] = []
    left, why = group.most, ""
    for wanted in group.wanted:
        value = stream.take(timeout).value
        left -= len(value or b"")
        why = why or _trouble(wanted, value, left)
        if value is not None and not why:
            whole.append(value)
        elif why:
            whole.clear()
    if why:
        damaged(group.what, why)
    else:
        yield group, whole


def _trouble(wanted: BlobRequest, value: bytes | None, left: int) -> str:
    what = f"{wanted.name} in {wanted.pack}" if wanted.pack else wanted.name
    if value is None:
        return f"{what} is missing there"
    if left < 0:
        return f"{what} is larger than the catalogue says"
    return "" if values.is_sound(wanted.name, value) else f"{what} is damaged there"


def batches(items: Iterable[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield items in lists of at most so many bytes; a larger item is alone in its list."""
    some, size = list[_T](), 0
    for item in items:
        if some and size + size_of(item) > most:
            yield some
            some, size = [], 0
        some.append(item)
        size += size_of(item)
    if some:
        yield some


_MOST_UNTAKEN = 256 * 2**20  # bytes that are read ahead of the consumer


class Prefetcher:
    """A shared store's reader in a daemon thread. `alive`: nothing has gone wrong so far."""

    def __init__(self, blobs: Readable) -> None:
        self._blobs = blobs
        self.url = blobs.url
        self._asked: queue.SimpleQueue[Sequence[BlobRequest] | None] = queue.SimpleQueue()
        self._there: queue.SimpleQueue[BlobResponse | KvtoolError] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._untaken = 0  # bytes that have come
        self._stopped = False
        self.alive = True
        self._thread = threading.Thread(target=self._run, name="kvtool-fetch", daemon=True)
        self._thread.start()

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        self._asked.put(wanted)

    def take(self, timeout: float) -> BlobResponse:
        """Return the next value in the order of the requests. Raises RemoteError, also if `timeout` seconds are
        over."""
        try:
            arrival = self._there.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            hint = "check the line; with --remote-timeout more is waited for"
            raise RemoteError(f"{self.url} sent nothing whole within {timeout:.3g} s", hint) from None
        if isinstance(arrival, KvtoolError):
            self.alive = False
            raise arrival
        with self._room:
            self._untaken -= len(arrival.value or b"")
            self._room.notify()
        return arrival

    def close(self) -> None:
        self._stopped = True
        self._asked.put(None)
        with self._room:
            self._room.notify()

    def _run(self) -> None:
        reader: Reader | None = None
        try:
            reader = self._blobs.reader()
            while not self._stopped and (wanted := self._next()) is not None:
                reader.ask(wanted)
                self._read(reader, wanted)
        except KvtoolError as error:
            self._there.put(error)
        except Exception as error:  # raised in the caller that waits
            self._there.put(RemoteError(f"{self.url} failed: {type(error).__name__}: {error}"))
        finally:
            if reader is not None:
                reader.close()

    def _read(self, reader: Reader, wanted: list[BlobRequest]) -> None:
        """Read the requested blobs; requests that come meanwhile are sent at once, before the link falls idle."""
        waiting = deque(wanted)
        while waiting and not self._stopped:
            while not self._asked.empty():
                more = self._next()
                if more is None:
                    return
                reader.ask(more)
                waiting += more
            value = reader.take()
            self._there.put(BlobResponse(waiting.popleft().name, value, time.perf_counter()))
            self._wait_for_room(len(value or b""))

    def _wait_for_room(self, size: int) -> None:
        with self._room:
            self._untaken += size
            self._room.wait_for(lambda: self._stopped or self._untaken < _MOST_UNTAKEN)

    def _next(self) -> list[BlobRequest] | None:
        asked = [self._asked.get()]
        while not self._asked.empty():
            asked.append(self._asked.get())
        return [one for wanted in asked for one in wanted or ()] if None not in asked else None
