"""Containers of documents: ZIP and gzip files, opened only if what they unpack to is within bounds, and the parts of
Open XML files, strict or transitional, with short names; damaged ones are left out and named."""

from __future__ import annotations

import gzip
import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.document import BinaryFile, EmptyFile, UnreadableFile

_MOST_BYTES = 1 << 30  # of all members, unpacked
_MOST_MEMBERS = 100_000
_MOST_TEXT = 1 << 28  # bytes, unpacked, of one member, or of a file that gzip has packed
_OLD_OFFICE, _ENCRYPTED = b"\xd0\xcf\x11\xe0", "EncryptedPackage".encode("utf-16-le")
LOCKED = 0x1  # flag bit of a member that needs a password
_LINKS = re.compile(r"(?:ppt/slides|xl/worksheets)/_rels/[^/]*", re.IGNORECASE)
_EMBEDDED = re.compile(rb'/relationships/(?:oleObject|package)"')
GZIP = ".gz"  # read as what the name says without it
_GZIP_MAGIC = b"\x1f\x8b"


def checked(data: bytes, is_archive: bool = False) -> zipfile.ZipFile:
    """Open a document's container or an archive. Raises UnreadableFile, or BinaryFile for an archive of over 1 GiB."""
    if data.startswith(_OLD_OFFICE):
        if _ENCRYPTED in data:
            raise UnreadableFile("protected by a password", "save a copy without one")
        raise UnreadableFile("an old Office file under a new name", "save it in the format that its name says")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UnreadableFile("damaged: not the ZIP container that its name says") from error
    members = archive.infolist()
    if not is_archive and any(member.flag_bits & LOCKED for member in members):
        raise UnreadableFile("protected by a password", "save a copy without one")
    size = sum(member.file_size for member in members)
    if size > _MOST_BYTES or len(members) > _MOST_MEMBERS:
        kind = BinaryFile if is_archive else UnreadableFile
        raise kind(f"unpacks to {len(members):,} parts of {size:,} bytes, which no document needs")
    return archive


def is_old(data: bytes) -> bool:
    """Whether it is an Office file of the format before 2007 that is not encrypted as a whole."""
    return data.startswith(_OLD_OFFICE) and _ENCRYPTED not in data


def embedded(archive: zipfile.ZipFile) -> int:
    links = (name for name in archive.namelist() if _LINKS.fullmatch(name))
    return sum(len(_EMBEDDED.findall(member(archive, name))) for name in links)


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        with archive.open(name) as file:
            data = file.read(_MOST_TEXT + 1)
    except KeyError as error:
        raise UnreadableFile(f"damaged: {name} is not in it") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UnreadableFile(f"damaged: {name} cannot be unpacked") from error
    if len(data) > _MOST_TEXT:
        raise UnreadableFile(f"{name} unpacks to over {_MOST_TEXT >> 20} MiB")
    return data


def parsed(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return parsed_xml(member(archive, name), name)


def parsed_xml(data: bytes, name: str) -> ElementTree.Element:
    """Parse XML; expat itself bounds the expansion of entities. Raises UnreadableFile."""
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # of an encoding that is none
        raise UnreadableFile(f"damaged: {name}: {error}") from error


def without_gz(path: PurePath) -> PurePath:
    return path.with_suffix("") if path.suffix.lower() == GZIP else path


def gunzip_start(data: bytes, most: int) -> bytes:
    """Unpack at most `most` bytes of a file's beginning; data that is not gzip is unchanged."""
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, most)  # 16: gzip's header
    except zlib.error:
        return data


def gunzip(data: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(_MOST_TEXT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableFile("damaged: gzip cannot unpack it") from error
    if len(content) > _MOST_TEXT:
        raise UnreadableFile(f"unpacks to over {_MOST_TEXT >> 20} MiB")
    if not content:
        raise EmptyFile("empty")
    return content


_PREFIXES = {"/math": "m", "/chart": "c", "/diagram": "dgm", "drawingml/2006/main": "a", "drawingml/main": "a"}


class Link(NamedTuple):
    kind: str
    name: str


def named(links: Mapping[str, Link], kind: str) -> str:
    return next((link.name for link in links.values() if link.kind == kind), "")


class Package:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.damaged: list[str] = []
        self._archive = archive
        self._names = {name.lower(): name for name in archive.namelist()}

    def part(self, name: str) -> Element | None:
        if not name:
            return None
        try:
            root = parsed(self._archive, self._names.get(name.lower(), name))
        except UnreadableFile:
            self.damaged += () if name in self.damaged else (name,)
            return None
        for element in root.iter():
            element.tag = _short(element.tag)
            element.attrib = {key.rpartition("}")[2]: text for key, text in element.items()}
        return root

    def main(self, usual: str) -> str:
        return named(self.links(), "officeDocument") or usual

    def data(self, name: str) -> bytes:
        return member(self._archive, self._names.get(name.lower(), name))

    def links(self, name: str = "") -> dict[str, Link]:
        folder, base = posixpath.split(name)
        rels = posixpath.join(folder, "_rels", f"{base}.rels")
        root = self.part(rels) if rels.lower() in self._names else None
        found = {}
        for each in () if root is None else root:
            target = posixpath.normpath(posixpath.join("/", folder, each.get("Target", ""))).lstrip("/")
            found[each.get("Id", "")] = Link(posixpath.basename(each.get("Type", "")), target)
        return found


@lru_cache(maxsize=4096)
def _short(tag: str) -> str:
    space, _, name = tag.rpartition("}")
    prefix = "w" if "wordprocessingml" in space else ""
    prefix = next((short for end, short in _PREFIXES.items() if space.endswith(end)), prefix)
    return f"{prefix}-{name}" if prefix else name
