"""Blobs as they arrive, taken with a bound on the time: whoever waits can give up, whatever the tier does."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvtool.core.cache.backend import Arrival, Wanted
from kvtool.core.errors import KvtoolError, RemoteError
from kvtool.core.remote.blobs import Readable, Reader

_MOST_UNTAKEN = 256 * 2**20  # bytes that are read ahead of whoever takes them


class Arrivals:
    """A tier's reader in a thread of its own, which ends with the process if it has to.

    Attributes
    ----------
    url : the tier's.
    alive : nothing has gone wrong so far.
    """

    def __init__(self, blobs: Readable) -> None:
        self._blobs = blobs
        self.url = blobs.url
        self._asked: queue.SimpleQueue[Sequence[Wanted] | None] = queue.SimpleQueue()
        self._there: queue.SimpleQueue[Arrival | KvtoolError] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._untaken = 0  # bytes that have come
        self._stopped = False
        self.alive = True
        self._thread = threading.Thread(target=self._run, name="kvtool-fetch", daemon=True)
        self._thread.start()

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """Ask for some more; never waits."""
        self._asked.put(wanted)

    def take(self, timeout: float) -> Arrival:
        """The next one asked for.

        Parameters
        ----------
        timeout : seconds to wait.

        Raises
        ------
        RemoteError : the tier is gone, or the time is over.
        """
        try:
            arrival = self._there.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            text = f"{self.url} sent nothing whole within {timeout:.3g} s"
            raise RemoteError(text, "check the line; with --remote-timeout more is waited for") from None
        if isinstance(arrival, KvtoolError):
            self.alive = False
            raise arrival
        with self._room:
            self._untaken -= len(arrival.value or b"")
            self._room.notify()
        return arrival

    def close(self) -> None:
        """Stop; the thread ends after what it is reading."""
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
        except Exception as error:  # handed to whoever waits
            self._there.put(RemoteError(f"{self.url} failed: {type(error).__name__}: {error}"))
        finally:
            if reader is not None:
                reader.close()

    def _read(self, reader: Reader, wanted: list[Wanted]) -> None:
        """Take what was asked for; what is asked meanwhile is sent at once, before the link falls idle."""
        waiting = deque(wanted)
        while waiting and not self._stopped:
            while not self._asked.empty():
                more = self._next()
                if more is None:
                    return
                reader.ask(more)
                waiting += more
            value = reader.take()
            self._there.put(Arrival(waiting.popleft().name, value, time.perf_counter()))
            self._wait_for_room(len(value or b""))

    def _wait_for_room(self, size: int) -> None:
        """Wait while much is untaken, so that a tier that is faster than whoever takes fills no memory."""
        with self._room:
            self._untaken += size
            self._room.wait_for(lambda: self._stopped or self._untaken < _MOST_UNTAKEN)

    def _next(self) -> list[Wanted] | None:
        """All that is asked for by now, at least one; None: it is over."""
        asked = [self._asked.get()]
        while not self._asked.empty():
            asked.append(self._asked.get())
        return [one for wanted in asked for one in wanted or ()] if None not in asked else None
