"""Prefetching of a shared store's values by threads; values that belong together come whole or not at all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvtool.core.cache.backend import BlobRequest, BlobResponse
from kvtool.core.errors import KvtoolError, RemoteError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Readable

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
    blobs: Readable, groups: Iterable[Group], timeout: float, damaged: Callable[[str, str], None], at_once: int
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


GAP = 64 * 2**10  # bytes between two parts that one request covers, rather than two
_MOST_UNTAKEN = 256 * 2**20  # bytes that are read ahead of the consumer; more only for one that waits


@dataclass(eq=False)
class Span:
    """A request for a value, or for near parts of a pack, of which `left` values are still to be taken."""

    request: BlobRequest
    left: int = 0
    data: bytearray = field(default_factory=bytearray)
    missing: bool = False
    started: bool = False
    done: bool = False
    at: float = 0.0  # of the last bytes
    error: KvtoolError | None = None

    def holds(self, wanted: BlobRequest) -> bool:
        return bool(wanted.pack) and len(self.data) >= wanted.start + wanted.most - self.request.start


def spans_of(wanted: Sequence[BlobRequest], most: int) -> list[Span]:
    """Return the request of each value, in that order; near parts share one of up to `most` bytes."""
    spans: dict[int, Span] = {}
    last: Span | None = None
    for number in sorted(range(len(wanted)), key=lambda number: (wanted[number].pack, wanted[number].start)):
        part, joined = wanted[number], last.request if last is not None else None
        stop = part.start + part.most
        if last is None or joined is None or not _is_near(joined, part, most):
            last = Span(part)
        else:
            last.request = joined._replace(most=max(joined.most, stop - joined.start))
        last.left += 1
        spans[number] = last
    return [spans[number] for number in range(len(wanted))]


def _is_near(span: BlobRequest, part: BlobRequest, most: int) -> bool:
    end = span.start + span.most
    return part.pack == span.pack != "" and part.start <= end + GAP and part.start + part.most - span.start <= most


class Prefetcher:
    """Values of a source, fetched by daemon threads ahead of the consumer. `alive`: nothing has gone wrong so far."""

    def __init__(self, blobs: Readable) -> None:
        self._blobs = blobs
        self.url, self.alive = blobs.url, True
        self._requested = deque[tuple[BlobRequest, Span]]()
        self._waiting = deque[Span]()
        self._due: Span | None = None  # the consumer waits for it
        self._untaken = 0  # bytes that have come
        self._at = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        spans = spans_of(wanted, self._blobs.joined)
        with self._changed:
            self._requested.extend(zip(wanted, spans, strict=True))
            self._waiting.extend(dict.fromkeys(spans))
            self._changed.notify_all()
        for _ in range(min(self._blobs.at_once - len(self._threads), len(spans))):
            self._threads.append(threading.Thread(target=self._run, name="kvtool-fetch", daemon=True))
            self._threads[-1].start()

    def take(self, timeout: float) -> BlobResponse:
        """Return the next value in the order of the requests. Raises RemoteError, also if `timeout` seconds are
        over."""
        with self._changed:
            wanted, span = self._requested[0]
            self._due = span
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: span.done or span.holds(wanted), max(timeout, 0.0)):
                hint = "check the line; with --remote-timeout more is waited for"
                raise RemoteError(f"{self.url} sent nothing whole within {timeout:.3g} s", hint)
            if span.error is not None and not span.holds(wanted):
                self.alive = False
                raise span.error
            self._requested.popleft()
            start = wanted.start - span.request.start
            value = None if span.missing else bytes(memoryview(span.data)[start : start + wanted.most])
            self._at = max(self._at, span.at)
            span.left -= 1
            if not span.left:
                self._untaken -= len(span.data)
                self._changed.notify_all()
            return BlobResponse(wanted.name, value, self._at)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while spans := self._next():
            error, done = None, 0
            try:
                for number, piece in self._blobs.fetch([span.request for span in spans]):
                    with self._changed:
                        if self._closed:
                            return
                        self._end(spans[done:number])
                        done, span = number, spans[number]
                        span.missing, span.at = piece is None, time.perf_counter()
                        span.data += piece or b""
                        self._untaken += len(piece or b"")
                        self._changed.notify_all()
            except KvtoolError as failed:
                error = failed
            except Exception as failed:  # raised in the caller that waits
                error = RemoteError(f"{self.url} failed: {type(failed).__name__}: {failed}")
            with self._changed:
                self._end(spans[done:], error)
                self._changed.notify_all()

    def _end(self, spans: Sequence[Span], error: KvtoolError | None = None) -> None:
        for span in spans:
            span.error, span.done, span.at = error, True, time.perf_counter()

    def _next(self) -> list[Span]:
        """Return the spans of the next fetch, together no larger than one may be; none: the stream is closed."""

        def is_ready() -> bool:
            is_due = self._due is not None and not self._due.started
            return self._closed or (bool(self._waiting) and (is_due or self._untaken < _MOST_UNTAKEN))

        with self._changed:
            self._changed.wait_for(is_ready)
            spans, size = list[Span](), 0
            while not self._closed and self._waiting and len(spans) < self._blobs.together:
                size += self._waiting[0].request.most
                if spans and size > self._blobs.joined:
                    break
                self._waiting[0].started = True
                spans.append(self._waiting.popleft())
            return spans
