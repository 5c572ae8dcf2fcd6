"""Protocol of a shared store's backend, and what a backend needs: readers, leases, the registry of URLs."""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.common.installing import extra_line
from kvtool.core.common.plugins import found
from kvtool.core.common.urls import KINDS, SCHEME, for_people, is_url
from kvtool.core.errors import KvtoolError, UsageError

TIMEOUT = 5.0  # seconds for a value, after which a shared store counts as gone
LEASES = {"push": 600.0, "sweep": 60.0}  # seconds that a lease lasts, by what its name begins with
AHEAD = 3600.0  # seconds: two clocks may differ by less


class Reader(Protocol):
    """A stream of values: requests are sent ahead, so that the connection is never idle in between."""

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        """Request more values; return before they arrive. Raises RemoteError."""

    def take(self) -> bytes | None:
        """Return the next value in the order of the requests: None if it is missing, empty if it is too large or no
        value at all, shorter if a part is cut off. Raises RemoteError; the reader is of no more use then."""

    def close(self) -> None: ...


class SequentialReader:
    """A reader without requests ahead: `read` returns a value when it is taken."""

    def __init__(self, read: Callable[[BlobRequest], bytes | None]) -> None:
        self._read, self._asked = read, deque[BlobRequest]()

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        self._asked.extend(wanted)

    def take(self) -> bytes | None:
        return self._read(self._asked.popleft())

    def close(self) -> None:
        self._asked.clear()


class Readable(Protocol):
    """A source that a pull reads from: a shared store, or a pack. `url` is shown to people."""

    url: str

    def reader(self) -> Reader:
        """Raises RemoteError."""


class Blobs(Readable, Protocol):
    """Named values of a shared store. Names are ASCII, with `/` between their parts. Methods raise RemoteError.

    A value is never changed, only put again with the same bytes or deleted; only `head` is replaced. So a reader sees
    either all of a push or nothing of it. Digests protect the values, not the shared store."""

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Read values: None if one is missing, empty if one is larger than its name allows, or no value at all."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return each value's size in bytes; 0 if it is missing or empty (kvtool never stores an empty value)."""

    def put(self, values: Mapping[str, bytes]) -> None:
        """Store values, each whole or not at all."""

    def flush(self) -> None:
        """Make durable what was put, as far as the backend can."""

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a value if it is still `before` (None: missing). False: another value is there by now."""

    def names(self, below: str = "") -> Iterator[str]:
        """List the names that begin so, in no order."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""

    def hold(self, name: str) -> None:
        """Take or renew a lease, which all users of the store see until it expires. Its name is a key of `LEASES`, `-`
        and an id. A lease is no value: `names` does not list it."""

    def held(self) -> set[str]:
        """Return the names with a valid lease by the shared store's own clock; the caller has just renewed its own."""

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


class PrivateBlobs:
    """A store that nobody else uses: nothing has to be leased, deleted or synced."""

    def flush(self) -> None: ...

    def delete(self, names: Sequence[str]) -> None: ...

    def hold(self, name: str) -> None: ...

    def held(self) -> set[str]:
        return set()

    def release(self, name: str) -> None: ...

    def close(self) -> None:
        """Do nothing: the caller opened it."""


def seconds_held(name: str) -> float:
    """Raises KeyError for a name that is no lease's."""
    return LEASES[name.partition("-")[0]]


def lease_is_valid(name: str, renewed: float, now: float) -> bool:
    """Return True if a lease is valid that was last renewed at a time. A time far in the future does not count: the
    clock was wrong then, and the lease would not end before that time. Raises KeyError for another name."""
    return -AHEAD < now - renewed < seconds_held(name)


# ---- several range requests at once, for a place that takes a while to answer --------------------------------------
#
# `obstore.get_ranges` joins near parts, too, but returns when all have come, and reads whatever else a server sends.

GAP = 64 * 2**10  # bytes between two parts that one request covers, rather than two
MOST_TOGETHER = 4 * 2**20  # bytes of one request for several parts
AT_ONCE = 8  # requests
_MOST_BUFFERED = 64 * 2**20  # bytes that have arrived and are not taken; more are read only for a caller that waits


@dataclass(eq=False)
class RangeRequest:
    """A request for a whole value of at most `stop` bytes, or for the bytes of a value from `start` to `stop`. `left`
    values are still to be taken from it. `data` stays empty if it is missing or too large."""

    name: str
    start: int
    stop: int
    is_part: bool
    left: int = 0
    data: bytearray = field(default_factory=bytearray)
    missing: bool = False
    started: bool = False
    done: bool = False
    error: Exception | None = None

    def holds(self, wanted: BlobRequest) -> bool:
        return self.is_part and len(self.data) >= wanted.start + wanted.most - self.start


Fetch = Callable[[RangeRequest], Iterator[bytes]]  # the bytes as they come; sets `missing`


def range_requests(wanted: Sequence[BlobRequest]) -> list[RangeRequest]:
    """Return the request of each wanted value, in that order; parts that are near each other share one."""
    spans: dict[int, RangeRequest] = {}
    parts = [number for number, one in enumerate(wanted) if one.pack]
    last: RangeRequest | None = None
    for number in sorted(parts, key=lambda number: (wanted[number].pack, wanted[number].start)):
        one = wanted[number]
        end = one.start + one.most
        if last is None or not _is_near(last, one):
            last = RangeRequest(one.pack, one.start, end, True)
        last.stop, last.left = max(last.stop, end), last.left + 1
        spans[number] = last
    return [spans.get(number) or RangeRequest(one.name, 0, one.most, False, 1) for number, one in enumerate(wanted)]


def _is_near(span: RangeRequest, one: BlobRequest) -> bool:
    end = max(span.stop, one.start + one.most)
    return one.pack == span.name and one.start <= span.stop + GAP and end - span.start <= MOST_TOGETHER


class RangeReader:
    """Several requests at once; `fetch` yields the bytes of one, in a separate thread."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._requested = deque[tuple[BlobRequest, RangeRequest]]()
        self._waiting = deque[RangeRequest]()
        self._running = self._buffered = 0  # requests, bytes
        self._changed = threading.Condition()
        self._closed = False

    def ask(self, wanted: Sequence[BlobRequest]) -> None:
        spans = range_requests(wanted)
        with self._changed:
            self._requested.extend(zip(wanted, spans, strict=True))
            self._waiting.extend(dict.fromkeys(spans))
            self._start_waiting()

    def take(self) -> bytes | None:
        with self._changed:
            wanted, span = self._requested.popleft()
            self._start(span)
            self._changed.wait_for(lambda: span.done or span.holds(wanted))
            if span.error is not None and not span.holds(wanted):
                raise span.error
            at = wanted.start - span.start
            value = None if span.missing else bytes(span.data[at : at + wanted.most])
            span.left -= 1
            if not span.left:
                self._buffered -= len(span.data)
                span.data = bytearray()
                self._start_waiting()
            return value

    def close(self) -> None:
        """Requests under way run to their end."""
        with self._changed:
            self._closed = True
            self._waiting.clear()

    def _start_waiting(self) -> None:
        while self._waiting and self._running < AT_ONCE and self._buffered < _MOST_BUFFERED:
            self._start(self._waiting.popleft())

    def _start(self, span: RangeRequest) -> None:
        if not span.started:
            span.started = True
            self._running += 1
            threading.Thread(target=self._run, args=(span,), name="kvtool-range", daemon=True).start()

    def _run(self, span: RangeRequest) -> None:
        error: Exception | None = None
        try:
            for piece in self._fetch(span):
                with self._changed:
                    if self._closed:
                        break
                    span.data += piece
                    self._buffered += len(piece)
                    self._changed.notify_all()
        except Exception as failed:  # raised in the caller that waits
            error = failed
        with self._changed:
            span.error, span.done = error, True
            self._running -= 1
            self._start_waiting()
            self._changed.notify_all()


# ---- the backend of a URL ------------------------------------------------------------------------------------------

# The sign @ is before the URLs: after a URL it would look like the end of a password, which `scrubbed` hides
_SUCH_AS = "in a password write / @ ? # as %2F %40 %3F %23; such as redis://host:6379/0 or file:///mnt/shared/kv"

_PLUGINS = found("blobs", names=KINDS)


def open_blobs(url: str, timeout: float = TIMEOUT) -> Blobs:
    """Return the backend of a URL; no request is sent yet. Raises UsageError for a broken URL or an unknown kind,
    KvtoolError if a package is missing, PluginError if the plugin for such URLs cannot be used."""
    kind, mark, _ = url.partition("://")
    if not mark or not SCHEME.fullmatch(kind):
        hint = _SUCH_AS
        if not (is_url(url) or "@" in url or "\0" in url):  # else it is meant as a URL, with a password perhaps
            hint = f"a folder is named by {Path(url).absolute().as_uri()}; others are such as redis://host:6379/0"
        raise UsageError(f"'{for_people(url)}' is no URL of a shared store", hint)
    try:
        return _opener(kind.lower())(url, timeout)
    except ValueError:  # what it says of the URL repeats parts of it, which may be those of a password
        raise UsageError(f"the URL {for_people(url)} cannot be read", _SUCH_AS) from None


def _opener(kind: str) -> Callable[[str, float], Blobs]:
    if kind in KINDS:
        try:
            backend = importlib.import_module(f"kvtool.core.remote.{KINDS[kind].module}")
        except ImportError as error:
            packages, extra = KINDS[kind].needs
            raise KvtoolError(f"{kind}:// needs the {packages}", extra_line(extra)) from error
        return cast(Callable[[str, float], Blobs], backend.from_url)
    if kind not in _PLUGINS:
        raise UsageError(f"there is no shared store of the kind {kind}://", f"known: {', '.join([*KINDS, *_PLUGINS])}")
    opener = _PLUGINS[kind].load()
    if not callable(opener):
        raise _PLUGINS[kind].broken("it is no function")
    return cast(Callable[[str, float], Blobs], opener)
