"""EPUB books: the pages of their spine, read as HTML."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote

from kvtool.core.corpus.readers.containers import checked, member, parsed
from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered
from kvtool.core.corpus.readers.html import page_text, visible

_CONTAINER = "META-INF/container.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def read(source: str, data: bytes) -> list[Document]:
    with checked(data) as archive:
        if "META-INF/encryption.xml" in archive.namelist() and "META-INF/rights.xml" in archive.namelist():
            raise UnreadableFile("protected by its seller (DRM)")
        pages = [visible(page_text(member(archive, name))) for name in _spine(archive)]
        return [numbered(source, "html", "ch.", pages)]


def _spine(archive: zipfile.ZipFile) -> Iterator[str]:
    root = next((e.get("full-path", "") for e in parsed(archive, _CONTAINER).iterfind(".//{*}rootfile")), "")
    book = parsed(archive, root)
    pages = {e.get("id"): e.get("href", "") for e in book.iter() if e.get("media-type") in _PAGES}
    for item in book.iterfind(".//{*}itemref"):
        if href := pages.get(item.get("idref")):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(href.partition("#")[0])))
