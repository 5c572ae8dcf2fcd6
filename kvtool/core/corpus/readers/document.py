"""What a reader hands on, and the error for a file that none can read."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.errors import KvtoolError


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus.

    Parameters
    ----------
    source : POSIX absolute path; a row of a JSON-lines file adds `#` and its id or line number.
    text : the text itself: newlines and control characters as in the file, no BOM, no lone surrogate.
    kind : `text`, `markdown`, `html` or `code`.
    notes : warnings about how the text was read.
    """

    source: str
    text: str
    kind: str
    notes: tuple[str, ...] = ()


class UnreadableFile(KvtoolError):
    """A file holds no text that can be read; the message is the reason, without the path."""


class EmptyFile(UnreadableFile):
    """There is nothing to read in it, and nothing wrong with it."""


class BinaryFile(UnreadableFile):
    """It is no text."""
