"""How many chunks questions found and missed: appended by readers without any lock, summed up when somebody asks."""

from __future__ import annotations

import contextlib
import re
import stat
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.cache import layout
from kvtool.core.cache.access import append

_LINE = re.compile(rb"([0-9]{1,12}) ([0-9]{1,12}) ([0-9]{1,12}) ([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class Served:
    """Questions, and the chunks of their prompts that were found and missed."""

    questions: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the chunks that were found; None before the first question."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


class ServedLog:
    """Counts in memory; a flush adds one line to a file beside the store."""

    def __init__(self, root: Path, enabled: bool) -> None:
        self._path = root / layout.SERVED_FILE
        self._enabled = enabled
        self._counts = [0, 0, 0]
        self._mutex = threading.Lock()

    def note(self, hits: int, misses: int) -> None:
        """One question."""
        if self._enabled:
            with self._mutex:
                self._counts = [old + new for old, new in zip(self._counts, (1, hits, misses), strict=True)]

    def flush(self) -> None:
        """Append what is counted. Never an error: it is for people only."""
        with self._mutex:
            counts, self._counts = self._counts, [0, 0, 0]
        if not counts[0]:
            return
        body = " ".join(map(str, counts)).encode()
        with contextlib.suppress(OSError):
            append(self._path, body + f" {zlib.crc32(body):08x}\n".encode())

    def total(self) -> Served:
        """The sum of all sound lines; what cannot be read counts nothing."""
        try:
            regular = stat.S_ISREG(self._path.lstat().st_mode)  # reading a FIFO would hang
            lines = self._path.read_bytes().splitlines() if regular else []
        except OSError:
            lines = []
        sums = [0, 0, 0]
        for line in lines:
            found = _LINE.fullmatch(line)
            if found and zlib.crc32(line[:-9]) == int(found[4], 16):
                sums = [old + int(new) for old, new in zip(sums, found.groups()[:3], strict=True)]
        return Served(*sums)
