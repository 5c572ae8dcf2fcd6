"""Files → documents: a registry from file ending to reader, one module per reader.

A new reader is a module with `ENDINGS` and `read`, and one line in `_MODULES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath

from kvtool.core.corpus.readers import code, html, jsonl, markdown, text
from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile, UnreadableFile
from kvtool.core.corpus.readers.encoding import decode
from kvtool.core.corpus.readers.foreign import is_foreign

__all__ = [
    "READERS",
    "BinaryFile",
    "Document",
    "EmptyFile",
    "UnreadableFile",
    "is_foreign",
    "is_known",
    "read_documents",
]

Reader = Callable[[str, str], list[Document]]

_MODULES = (text, markdown, html, code, jsonl)

READERS: dict[str, Reader] = {ending: module.read for module in _MODULES for ending in module.ENDINGS}
"""Lower-case file ending, or whole lower-case name of a file without one → reader."""


def is_known(path: PurePath) -> bool:
    """Whether a reader is registered for this name."""
    return _ending(path) in READERS


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
    reader = READERS.get(_ending(path), text.read)
    declared = html.declared_encoding(data) if reader is html.read else ""
    content, notes = decode(data, declared)
    if not content.strip():
        raise EmptyFile("empty")
    documents = reader(_source(path), content)
    documents[0] = replace(documents[0], notes=notes + documents[0].notes)
    return documents


def _ending(path: PurePath) -> str:
    return path.suffix.lower() or path.name.lower()


def _source(path: Path) -> str:
    return Path(os.path.abspath(path)).as_posix()
