"""Files → documents: a registry from file ending to reader, one module per reader.

A new reader is a module with `ENDINGS` and `read`, which makes documents of a file's bytes (`@of_text()` where they are
text), and its name in `_MODULES`.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from kvtool.core.corpus.readers import code, html, jsonl, markdown, text
from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile, UnreadableFile
from kvtool.core.corpus.readers.encoding import Reader
from kvtool.core.corpus.readers.foreign import FOREIGN_ENDINGS, IMAGE_ENDINGS

__all__ = [
    "READERS",
    "BinaryFile",
    "Document",
    "EmptyFile",
    "UnreadableFile",
    "is_foreign",
    "is_image",
    "is_known",
    "read_documents",
]

_MODULES = (text, markdown, html, code, jsonl)

READERS: dict[str, Reader] = {ending: module.read for module in _MODULES for ending in module.ENDINGS}
"""Lower-case file ending, or whole lower-case name of a file without one → reader."""


def is_known(path: PurePath) -> bool:
    """Whether a reader is registered for this name."""
    return _ending(path) in READERS


def is_foreign(path: PurePath) -> bool:
    """Whether the name says that the file holds no text, and no reader is registered for it."""
    return path.suffix.lower() in FOREIGN_ENDINGS and not is_known(path)


def is_image(path: PurePath) -> bool:
    """Whether the name says that the file is a picture."""
    return path.suffix.lower() in IMAGE_ENDINGS


def read_documents(path: Path, data: bytes) -> list[Document]:
    """Read the documents of one file.

    Parameters
    ----------
    path : where the bytes come from; its ending picks the reader, an unknown one is plain text.
    data : the file's bytes.

    Raises
    ------
    UnreadableFile
        If the file is empty, binary, or holds no text.
    """
    return READERS.get(_ending(path), text.read)(_source(path), data)


def _ending(path: PurePath) -> str:
    return path.suffix.lower() or path.name.lower()


def _source(path: Path) -> str:
    return Path(os.path.abspath(path)).as_posix()
