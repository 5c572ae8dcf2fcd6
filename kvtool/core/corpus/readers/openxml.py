"""Parts of an Open XML file, strict or transitional, with short names; damaged ones are left out and named."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import member, parsed
from kvtool.core.corpus.readers.document import UnreadableFile

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
