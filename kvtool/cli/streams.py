"""Streams that take any text and never fail because of what it holds."""

from __future__ import annotations

import errno
import io
import os
import shutil
from contextlib import suppress
from typing import IO

from kvtool.cli.text import degrade


class SafeStream(io.TextIOBase):
    """A text stream that takes any text; what `rich` draws on, too."""

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream  # None where the process was started without it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(ValueError, AttributeError):
            return self.stream is not None and self.stream.isatty()
        return False

    @property
    def columns(self) -> int | None:
        """The width of the terminal in cells; None: it is none."""
        if not self.isatty():
            return None
        with suppress(OSError, ValueError):
            if columns := os.get_terminal_size(self.fileno()).columns:
                return columns
        return shutil.get_terminal_size().columns

    def is_beside(self, other: SafeStream) -> bool:
        """Whether both are shown on a terminal, or go into the same pipe or file."""
        if self.isatty() and other.isatty():
            return True
        with suppress(OSError, ValueError, AttributeError):
            return self.stream is not None and os.path.samestat(os.fstat(self.fileno()), os.fstat(other.fileno()))
        return False

    def fileno(self) -> int:
        """The stream's own number. Raises OSError where it has none."""
        if self.stream is None:
            raise OSError("the stream is closed")
        return self.stream.fileno()

    def write(self, text: str) -> int:
        if self.stream is not None:
            fitting = degrade(text, self.encoding)
            raw = getattr(self.stream, "buffer", None)
            if isinstance(raw, io.RawIOBase):
                _write_all(raw, fitting.encode(self.encoding, "replace"))
            else:
                self.stream.write(fitting)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Leave the stream open, and what is in it: who ends the process looks after both. A flush that fails when this
        is let go of would be told on standard error, since Python 3.13."""


def _write_all(raw: io.RawIOBase, data: bytes) -> None:
    """Write to a stream without a buffer, as PYTHONUNBUFFERED has it: where a disk takes only a part, Python itself
    passes over the rest. Raises OSError."""
    left = memoryview(data)
    while left:
        written = raw.write(left)
        if written is None:
            raise BlockingIOError(errno.EAGAIN, "it takes no more for now")
        left = left[written:]


def silence(stream: IO[str] | None) -> None:
    """Send what is still buffered to nowhere, so that the interpreter's last flush cannot fail."""
    with suppress(Exception):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
