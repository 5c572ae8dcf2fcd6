"""ZIP archives: each file in them that a reader knows, as a document of its own."""

from __future__ import annotations

import posixpath
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from zipfile import ZipFile, ZipInfo

from kvtool.core.corpus.ignoring import is_hidden, is_lock, is_secret
from kvtool.core.corpus.readers import ending_of, is_known, kind_of, read_as
from kvtool.core.corpus.readers.containers import LOCKED, checked, member
from kvtool.core.corpus.readers.document import (
    BinaryFile,
    Document,
    EmptyFile,
    MissingPackage,
    UnreadableFile,
    shortened,
    unread_note,
)

_MOST_TEXT = 1 << 26  # characters; an archive with more is a release of code, or a backup
_MOST_FILES = 2000
_UTF_8 = 0x800  # flag bit of a member's name
_DISGUISED = {  # members that show what a file is that is called an archive
    **{"word/document.xml": ".docx", "ppt/presentation.xml": ".pptx", "xl/workbook.xml": ".xlsx"},
    **{"META-INF/container.xml": ".epub", "mimetype": ".odt"},
}


def read(source: str, data: bytes) -> list[Document]:
    """Read files as `archive.zip#folder/name.md`; a note counts the others. Raises UnreadableFile."""
    documents: list[Document] = []
    failures: list[str] = []
    missing: MissingPackage | None = None
    with checked(data, is_archive=True) as archive:
        if ending := next((ending for name, ending in _DISGUISED.items() if name in archive.NameToInfo), ""):
            return read_as(PurePath("a" + ending), source, data)
        members, unread = _members(archive)
        for name, info in members.items():
            try:
                documents += _read_member(archive, info, PurePath(name), f"{source}#{name}")
            except EmptyFile:
                continue
            except MissingPackage as error:
                missing = error
                failures.append(f"{name}: {error.message} ({error.hint})")
            except UnreadableFile as error:
                failures.append(f"{name}: {error.message}")
            if len(members) > _MOST_FILES or sum(len(document.text) for document in documents) > _MOST_TEXT:
                raise BinaryFile(f"archive of {len(members):,} files with much text: unpack it, and name the folder")
    notes = (*unread_note(unread), *shortened(failures))
    if not documents:
        why = f"archive without a document that can be read ({'; '.join(notes) or 'empty'})"
        raise missing or BinaryFile(why)
    return [replace(documents[0], notes=(*documents[0].notes, *notes)), *documents[1:]]


def _members(archive: ZipFile) -> tuple[dict[str, ZipInfo], Counter[str]]:
    found: dict[str, ZipInfo] = {}
    unread: Counter[str] = Counter()
    for info in archive.infolist():
        path = PurePath(posixpath.normpath("/" + _name(info)).strip("/"))
        if info.is_dir() or any(is_hidden(part) or part == "__MACOSX" for part in path.parts):
            continue
        kinds = {"files of the same name": path.as_posix() in found, "secrets": is_secret(path.name)}
        kinds |= {"lock files": is_lock(path.name), _unread_kind(path): True}
        if kind := next(kind for kind, applies in kinds.items() if applies):
            unread[kind] += 1
        else:
            found[path.as_posix()] = info
    return found, unread


def _unread_kind(path: PurePath) -> str:
    if is_known(path) and ending_of(path) != ".zip":
        return ""
    return {"image": "pictures", "archive": "archives"}.get(kind_of(path), "other files")


def _name(info: ZipInfo) -> str:
    """Decode a member's name: old programs write UTF-8 without saying so, which `zipfile` takes for cp437."""
    name = info.filename.replace("\\", "/")
    if not info.flag_bits & _UTF_8:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return "".join(filter(str.isprintable, name))


def _read_member(archive: ZipFile, info: ZipInfo, path: PurePath, source: str) -> list[Document]:
    if info.flag_bits & LOCKED:
        raise UnreadableFile("protected by a password")
    try:
        return read_as(path, source, member(archive, info.filename))
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:  # whatever a library raises over a broken file
        raise UnreadableFile(f"damaged ({type(error).__name__})") from error
