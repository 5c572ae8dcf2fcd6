"""Values and parts of packs from a place that takes a while to answer: several requests at once, neighbours in one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtool.core.cache.backend import Wanted
from kvtool.core.errors import KvtoolError

GAP = 64 * 2**10  # bytes between two parts that are read with them rather than asked for apart
MOST_TOGETHER = 4 * 2**20  # bytes of one request for several parts
AT_ONCE = 8  # requests
_MOST_HELD = 64 * 2**20  # bytes that have come and are not taken; more are read only for who waits for them


@dataclass(eq=False)
class Span:
    """A request for a whole value of at most `stop` bytes, or for the bytes of a value from `start` to `stop`.

    Attributes
    ----------
    left : number of values that are still to be read from it.
    data : the bytes that have arrived.
    missing : no value has this name. `too_large` : the value is too large, and nothing of it is read.
    """

    name: str
    start: int
    stop: int
    is_part: bool
    left: int = 0
    data: bytearray = field(default_factory=bytearray)
    missing: bool = False
    too_large: bool = False
    begun: bool = False
    done: bool = False
    error: KvtoolError | None = None

    def holds(self, wanted: Wanted) -> bool:
        """Return True if all bytes of a part have arrived."""
        return self.is_part and len(self.data) >= wanted.start + wanted.most - self.start


Fetch = Callable[[Span], Iterator[bytes]]  # the bytes as they come; sets `missing` and `too_large`


def spans_of(wanted: Sequence[Wanted]) -> list[Span]:
    """A request for each of what is wanted, in that order; parts that are near each other have the same one."""
    spans: dict[int, Span] = {}
    parts = [number for number, one in enumerate(wanted) if one.pack]
    last: Span | None = None
    for number in sorted(parts, key=lambda number: (wanted[number].pack, wanted[number].start)):
        one = wanted[number]
        end = one.start + one.most
        if last is None or not _is_near(last, one):
            last = Span(one.pack, one.start, end, True)
        last.stop, last.left = max(last.stop, end), last.left + 1
        spans[number] = last
    return [spans.get(number) or Span(one.name, 0, one.most, False, 1) for number, one in enumerate(wanted)]


def _is_near(span: Span, one: Wanted) -> bool:
    end = max(span.stop, one.start + one.most)
    return one.pack == span.name and one.start <= span.stop + GAP and end - span.start <= MOST_TOGETHER


class SpanReader:
    """See Reader.

    Parameters
    ----------
    fetch : the bytes of a request; run in a thread of its own.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._asked = deque[tuple[Wanted, Span]]()
        self._waiting = deque[Span]()
        self._flying = self._held = 0  # requests, bytes
        self._news = threading.Condition()
        self._closed = False

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """See Reader."""
        spans = spans_of(wanted)
        with self._news:
            self._asked.extend(zip(wanted, spans, strict=True))
            self._waiting.extend(dict.fromkeys(spans))
            self._go_on()

    def take(self) -> bytes | None:
        """See Reader."""
        with self._news:
            wanted, span = self._asked.popleft()
            if not span.begun:
                self._begin(span)
            self._news.wait_for(lambda: span.done or span.holds(wanted))
            if span.error is not None and not span.holds(wanted):
                raise span.error
            value = self._cut(wanted, span)
            span.left -= 1
            if not span.left:
                self._held -= len(span.data)
                span.data = bytearray()
                self._go_on()
            return value

    def close(self) -> None:
        """See Reader. What is under way ends by itself."""
        with self._news:
            self._closed = True
            self._waiting.clear()

    def _cut(self, wanted: Wanted, span: Span) -> bytes | None:
        if span.missing or span.too_large:
            return None if span.missing else b""
        at = wanted.start - span.start if span.is_part else 0
        return bytes(span.data[at : at + wanted.most] if span.is_part else span.data)

    def _go_on(self) -> None:
        while self._waiting and self._flying < AT_ONCE and self._held < _MOST_HELD:
            span = self._waiting.popleft()
            if not span.begun:
                self._begin(span)

    def _begin(self, span: Span) -> None:
        span.begun = True
        self._flying += 1
        threading.Thread(target=self._run, args=(span,), name="kvtool-range", daemon=True).start()

    def _run(self, span: Span) -> None:
        error: KvtoolError | None = None
        try:
            for piece in self._fetch(span):
                with self._news:
                    if self._closed:
                        break
                    span.data += piece
                    self._held += len(piece)
                    self._news.notify_all()
        except KvtoolError as failed:
            error = failed
        except Exception as failed:  # handed to whoever waits
            error = KvtoolError(f"a request failed: {type(failed).__name__}")
        with self._news:
            span.error, span.done = error, True
            self._flying -= 1
            self._go_on()
            self._news.notify_all()
