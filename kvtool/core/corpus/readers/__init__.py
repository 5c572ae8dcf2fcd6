"""Files → documents: a registry from file ending to reader, one module per reader.

A new reader is a module with `ENDINGS` and `read`, which makes documents of a file's bytes (`@of_text()` where they are
text), and its name in `_MODULES`; in `_BOUNDED`, if a file can make what reads it slow, large or end. The others take
time linear in the file's length, which `tests/corpus/test_linear.py` checks.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath

from kvtool.core.common.plugins import Plugin, PluginError, found
from kvtool.core.corpus.readers import (
    code,
    epub,
    gzipped,
    html,
    jsonl,
    latex,
    mail,
    markdown,
    notebook,
    opendocument,
    pdf,
    roff,
    rtf,
    sheets,
    slides,
    subtitles,
    svg,
    text,
    unknown,
    word,
)
from kvtool.core.corpus.readers.document import (
    BinaryFile,
    Document,
    EmptyFile,
    MissingPackage,
    PassingFailure,
    SecretFile,
    UnreadableFile,
)
from kvtool.core.corpus.readers.encoding import Reader
from kvtool.core.corpus.readers.foreign import ARCHIVE_ENDINGS, FOREIGN_ENDINGS, IMAGE_ENDINGS

__all__ = [
    "READERS",
    "BinaryFile",
    "Document",
    "EmptyFile",
    "MissingPackage",
    "PassingFailure",
    "SecretFile",
    "UnreadableFile",
    "ending_of",
    "file_of",
    "is_archive",
    "is_bounded",
    "is_foreign",
    "is_image",
    "is_known",
    "kind_of",
    "library_of",
    "plugin_of",
    "read_documents",
    "source_of",
]

_BOUNDED = (pdf, word, slides, sheets, opendocument, epub, mail, notebook, html, rtf, svg)
_MODULES = (text, markdown, code, jsonl, latex, subtitles, roff, *_BOUNDED)

READERS: dict[str, Reader] = {ending: module.read for module in _MODULES for ending in module.ENDINGS}
"""Lower-case file ending, or whole lower-case name of a file without one → reader."""
_SEVERAL = (*jsonl.ENDINGS, *mail.ENDINGS)  # of files that may hold several documents
_BOUNDED_ENDINGS = frozenset(ending for module in _BOUNDED for ending in module.ENDINGS)
_LIBRARIES = {ending: getattr(module, "LIBRARY", "") for module in _BOUNDED for ending in module.ENDINGS}
_MOST_HERE = 1 << 20  # bytes of a text that is read in this process, by readers that take linear time
_PLUGINS = found("readers", own={ending.removeprefix(".") for ending in READERS})


def is_known(path: PurePath) -> bool:
    """Return True if a reader is registered for this name."""
    return ending_of(gzipped.inner(path)) in READERS or plugin_of(path) is not None


def plugin_of(path: PurePath) -> Plugin | None:
    """The plugin that reads files of this name."""
    return _PLUGINS.get(path.suffix.lower().removeprefix("."))


def library_of(path: PurePath) -> str:
    """The library that reads files of this name, with the version that is installed; empty where none is needed."""
    library = _LIBRARIES.get(ending_of(gzipped.inner(path)), "")
    if not library:
        return ""
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"no {library}"


def is_bounded(path: PurePath, size: int) -> bool:
    """Return True if a file is read in a separate process, within bounds (`corpus/reading.py`): by its name, or its
    size in bytes."""
    packed = path.suffix.lower() == gzipped.ENDING
    return packed or ending_of(path) in _BOUNDED_ENDINGS or plugin_of(path) is not None or size > _MOST_HERE


def is_foreign(path: PurePath) -> bool:
    """Return True if the name says that the file holds no text, and no reader is registered for it."""
    return gzipped.inner(path).suffix.lower() in FOREIGN_ENDINGS and not is_known(path)


def is_image(path: PurePath) -> bool:
    """Return True if the name is that of a picture."""
    return path.suffix.lower() in IMAGE_ENDINGS


def is_archive(path: PurePath) -> bool:
    """Return True if the name is that of an archive."""
    return path.suffix.lower() in ARCHIVE_ENDINGS


def kind_of(path: PurePath) -> str:
    """Name what a file is that no reader takes: `image`, `archive`, by another foreign ending that, else `binary`."""
    known = "image" if is_image(path) else "archive" if is_archive(path) else path.suffix.lower()
    return known if is_foreign(path) else "binary"


def read_documents(path: Path, data: bytes) -> list[Document]:
    """Read the documents of one file, in this process and without bounds.

    Parameters
    ----------
    path : where the bytes come from; its ending picks the reader; what has an unknown one is read by its content.
    data : the file's bytes.

    Raises
    ------
    UnreadableFile
        If the file is empty, binary, or holds no text.
    """
    plugin = plugin_of(path)
    if plugin is None:
        name = gzipped.inner(path)
        data = data if name == path else gzipped.unpacked(data)
        return READERS.get(ending_of(name), unknown.read)(source_of(path), data)
    try:
        read: Reader = plugin.load()
        return read(source_of(path), data)
    except PluginError as error:
        raise UnreadableFile(error.message, error.hint) from error


def ending_of(path: PurePath) -> str:
    """Return the key that selects a file's reader: its ending in lower case, or the whole name if it has no ending."""
    return path.suffix.lower() or path.name.lower()


def file_of(source: str) -> str:
    """The file of a document: one of several is called `file.jsonl#id`."""
    file, mark, _ = source.rpartition("#")
    return file if mark and ending_of(gzipped.inner(PurePath(file))) in _SEVERAL else source


def source_of(path: Path) -> str:
    """Return the source name of a file's document: its absolute path."""
    return Path(os.path.abspath(path)).as_posix()
