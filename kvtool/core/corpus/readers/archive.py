"""ZIP archives: each file in them that a reader knows, as a document of its own."""

from __future__ import annotations

import posixpath
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from zipfile import ZipFile, ZipInfo

from kvtool.core.corpus import readers
from kvtool.core.corpus.ignoring import is_hidden, is_lock, is_secret
from kvtool.core.corpus.readers.containers import LOCKED, checked, member
from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile, UnreadableFile, unread_note

_MOST_TEXT = 1 << 26  # bytes of plain text, unpacked
_MOST_FILES = 2000
_MOST_NOTES = 20
_UTF_8 = 0x800  # flag bit of a member's name
_DISGUISED = {  # a member that shows what a file is that is called an archive
    **{"word/document.xml": ".docx", "ppt/presentation.xml": ".pptx", "xl/workbook.xml": ".xlsx"},
    **{"META-INF/container.xml": ".epub", "mimetype": ".odt"},
}


def read(source: str, data: bytes) -> list[Document]:
    """Return the documents of all files that a reader knows, `archive.zip#folder/name.md`. A note counts the others.

    Raises
    ------
    UnreadableFile
        If it is damaged, or unpacks to too much.
    BinaryFile
        If it holds more text than documents have, or nothing that is read.
    """
    with checked(data, is_archive=True) as archive:
        kinds = [ending for name, ending in _DISGUISED.items() if name in archive.NameToInfo]
        if kinds:
            return readers.READERS[kinds[0]](source, data)
        members, unread = _members(archive)
        texts = sum(info.file_size for name, info in members.items() if not readers.is_bounded(PurePosixPath(name), 0))
        if len(members) > _MOST_FILES or texts > _MOST_TEXT:
            raise BinaryFile(
                f"archive of {len(members):,} files, {texts:,} bytes of text: unpack it, and name the folder"
            )
        documents: list[Document] = []
        failures = []
        for name, info in members.items():
            try:
                documents += _documents(archive, f"{source}#{name}", name, info)
            except EmptyFile:
                continue
            except UnreadableFile as error:
                failures.append(f"{name}: {error.message}")
    notes = (
        *unread_note(unread),
        *failures[:_MOST_NOTES],
        *unread_note({"further files": len(failures[_MOST_NOTES:])}),
    )
    if not documents:
        raise BinaryFile(f"archive without a document that can be read ({'; '.join(notes) or 'empty'})")
    return [replace(documents[0], notes=(*documents[0].notes, *notes)), *documents[1:]]


def _documents(archive: ZipFile, source: str, name: str, info: ZipInfo) -> list[Document]:
    if info.flag_bits & LOCKED:
        raise UnreadableFile("protected by a password")
    try:
        return readers.read_as(PurePosixPath(name), source, member(archive, info.filename))
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:  # whatever a library raises over a broken file
        raise UnreadableFile(f"damaged ({type(error).__name__})") from error


def _members(archive: ZipFile) -> tuple[dict[str, ZipInfo], Counter[str]]:
    """Return the files to read by their names, and how many others there are of each kind."""
    found: dict[str, ZipInfo] = {}
    unread: Counter[str] = Counter()
    for info in archive.infolist():
        name = posixpath.normpath("/" + _name(info)).strip("/")
        path = PurePosixPath(name)
        if info.is_dir() or any(is_hidden(part) or part == "__MACOSX" for part in path.parts):
            continue
        if kind := _kind(path):
            unread[kind] += 1
        elif name in found:
            unread["files of the same name"] += 1
        else:
            found[name] = info
    return found, unread


def _kind(path: PurePosixPath) -> str:
    """Return why a file is not read; "" if it is."""
    if is_secret(path.name):
        return "files that may hold keys or passwords"
    if is_lock(path.name):
        return "lock files"
    if readers.is_image(path):
        return "pictures"
    if readers.ending_of(path) == ".zip" or readers.is_foreign(path):
        return "archives" if readers.is_archive(path) else f"{path.suffix} files"
    return "" if readers.is_known(path) else "other files"


def _name(info: ZipInfo) -> str:
    """Return a member's name: old programs write UTF-8 without saying so, which `zipfile` reads as cp437."""
    name = info.filename.replace("\\", "/")
    if not info.flag_bits & _UTF_8:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return "".join(filter(str.isprintable, name))
