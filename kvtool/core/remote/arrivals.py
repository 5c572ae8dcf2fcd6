"""Blobs as they arrive, taken with a bound on the time: whoever waits can give up, whatever the tier does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.errors import KvtoolError, RemoteError
from kvtool.core.remote.blobs import Blobs, Reader


@dataclass(frozen=True, slots=True)
class Arrival:
    """A blob asked for: its value, None where there is none of its name, and when it was there (`perf_counter`)."""

    name: str
    value: bytes | None
    at: float


class Arrivals:
    """A tier's reader in a thread of its own, which ends with the process if it has to.

    Attributes
    ----------
    alive : nothing has gone wrong so far.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._there: queue.SimpleQueue[Arrival | KvtoolError] = queue.SimpleQueue()
        self._stopped = False
        self.alive = True
        self._thread = threading.Thread(target=self._run, name="kvtool-fetch", daemon=True)
        self._thread.start()

    def ask(self, names: Sequence[str]) -> None:
        """Ask for some more; never waits."""
        for name in names:
            self._asked.put(name)

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
            found = self._there.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise RemoteError(f"{self._blobs.url} sent nothing whole within {timeout:.3g} s") from None
        if isinstance(found, KvtoolError):
            self.alive = False
            raise found
        return found

    def close(self) -> None:
        """Stop; the thread ends after what it is reading."""
        self._stopped = True
        self._asked.put(None)

    def _run(self) -> None:
        reader: Reader | None = None
        try:
            reader = self._blobs.reader()
            while not self._stopped and (names := self._next()) is not None:
                reader.ask(names)
                self._read(reader, names)
        except KvtoolError as error:
            self._there.put(error)
        except Exception as error:  # handed to whoever waits
            self._there.put(RemoteError(f"{self._blobs.url} failed: {type(error).__name__}: {error}"))
        finally:
            if reader is not None:
                reader.close()

    def _read(self, reader: Reader, names: list[str]) -> None:
        """Take what was asked for; what is asked meanwhile is sent at once, before the link falls idle."""
        waiting = list(names)
        while waiting and not self._stopped:
            while not self._asked.empty():
                more = self._next()
                if more is None:
                    return
                reader.ask(more)
                waiting += more
            value = reader.take()
            self._there.put(Arrival(waiting.pop(0), value, time.perf_counter()))

    def _next(self) -> list[str] | None:
        """All that is asked for by now, at least one name; None: it is over."""
        names = [self._asked.get()]
        while not self._asked.empty():
            names.append(self._asked.get())
        return [name for name in names if name is not None] if None not in names else None
