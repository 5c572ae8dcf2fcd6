"""Automatic numbers of a Word document's paragraphs: clauses, headings, items of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.ir import counter

_LEVELS = 9


class Numbering(NamedTuple):
    """A paragraph's place in the numbering: the list's id, and the level, from 0."""

    list_id: str
    level: int


class Styles:
    """Styles of a document, each with those that it is based on."""

    def __init__(self, root: Element | None) -> None:
        found = () if root is None else root.findall("w-style")
        self._styles = {each.get("styleId", ""): each for each in found}
        self._found: dict[tuple[str, str], Element | None] = {}
        self.usual = next((key for key, each in self._styles.items() if _is_usual(each)), "")

    def names(self, key: str) -> Iterator[str]:
        """Yield the names in lower case of a style and of those that it is based on."""
        for _, style in self.chain(key):
            yield value(style.find("w-name")).lower()

    def chain(self, key: str) -> Iterator[tuple[str, Element]]:
        seen = set()
        while key in self._styles and key not in seen:
            seen.add(key)
            yield key, self._styles[key]
            key = value(self._styles[key].find("w-basedOn"))

    def find(self, key: str, path: str) -> Element | None:
        """Find a property of a style, or else of those that it is based on."""
        if (key, path) not in self._found:
            found = (style.find(path) for _, style in self.chain(key))
            self._found[key, path] = next((each for each in found if each is not None), None)
        return self._found[key, path]


def _is_usual(style: Element) -> bool:
    return style.get("type") == "paragraph" and is_on(style.get("default", "0"))


def value(element: Element | None, usual: str = "") -> str:
    """Return an element's main attribute."""
    return usual if element is None else element.get("val", usual)


def count(element: Element | None, usual: int = 0) -> int:
    text = value(element)
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else usual


def is_on(text: str) -> bool:
    """Return True for a switch that is on: it need not say so."""
    return text not in ("0", "false", "off")


class Clauses:
    """Counters of all lists of a document, as its paragraphs pass.

    Parameters
    ----------
    root : the part that defines the lists; None without one.
    """

    def __init__(self, root: Element | None, styles: Styles) -> None:
        self._styles = styles
        root = Element("none") if root is None else root
        self._plans = {each.get("abstractNumId", ""): each for each in root.findall("w-abstractNum")}
        self._lists = {each.get("numId", ""): each for each in root.findall("w-num")}
        self._levels: dict[str, tuple[str, list[Element | None]]] = {}
        self._counts: dict[str, dict[int, int]] = {}
        self._begun: set[Numbering] = set()

    def place(self, properties: Element | None, style: str) -> Numbering | None:
        """Find which list and level a paragraph belongs to, by itself or by its style."""
        own = None if properties is None else properties.find("w-numPr")
        list_id = value(None if own is None else own.find("w-numId"))
        level = None if own is None else own.find("w-ilvl")
        if not list_id:
            list_id = value(self._styles.find(style, "w-pPr/w-numPr/w-numId"))
            keys = [key for key, _ in self._styles.chain(style)]
            linked = (value(None if each is None else each.find("w-pStyle")) for each in self._of(list_id)[1])
            level = self._styles.find(style, "w-pPr/w-numPr/w-ilvl") if level is None else level
            if level is None:
                at = next((number for number, each in enumerate(linked) if each and each in keys), 0)
                return Numbering(list_id, at) if list_id in self._lists else None
        return Numbering(list_id, min(_LEVELS - 1, count(level))) if list_id in self._lists else None

    def _of(self, list_id: str) -> tuple[str, list[Element | None]]:
        """Return the plan that a list counts by, and the definitions of its levels."""
        if list_id not in self._levels:
            listed = self._lists.get(list_id, Element("none"))
            key = value(listed.find("w-abstractNumId"))
            plan = self._plans.get(key, Element("none"))
            if (link := value(plan.find("w-numStyleLink"))) and (
                other := self._lists.get(value(self._styles.find(link, "w-pPr/w-numPr/w-numId")))
            ) is not None:
                key = value(other.find("w-abstractNumId"))
                plan = self._plans.get(key, plan)
            levels: list[Element | None] = [None] * _LEVELS
            for each in (*plan.findall("w-lvl"), *listed.findall("w-lvlOverride/w-lvl")):
                if (at := each.get("ilvl", "")) in tuple("012345678"):
                    levels[int(at)] = each
            self._levels[list_id] = key, levels
        return self._levels[list_id]

    def next(self, at: Numbering) -> str:
        """Count a paragraph and return its number; `-` for a bullet, "" if none is shown."""
        key, levels = self._of(at.list_id)
        counts = self._counts.setdefault(key, {})
        start = self._lists[at.list_id].find(f"w-lvlOverride[@ilvl='{at.level}']/w-startOverride")
        if start is not None and at not in self._begun:
            counts.pop(at.level, None)
        self._begun.add(at)
        for upper in range(at.level):  # a level that was skipped counts
            counts.setdefault(upper, _start(levels[upper]))
        counts[at.level] = counts[at.level] + 1 if at.level in counts else count(start, _start(levels[at.level]))
        for lower in [lower for lower in counts if lower > at.level]:
            each = levels[lower]
            if at.level < count(None if each is None else each.find("w-lvlRestart"), lower):
                del counts[lower]
        return self._written(levels, at.level, counts)

    def _written(self, levels: list[Element | None], level: int, counts: dict[int, int]) -> str:
        own = levels[level]
        if own is None:
            return "-"
        if _format(own) == "bullet":
            return "-"
        legal = own.find("w-isLgl")
        plain = legal is not None and is_on(value(legal, "1"))

        def number(found: re.Match[str]) -> str:
            upper = int(found[1]) - 1
            form = _format(levels[upper])
            return counter(counts.get(upper, _start(levels[upper])), "decimal" if plain and form != "none" else form)

        return re.sub("%([1-9])", number, value(own.find("w-lvlText"))).strip()


def _start(level: Element | None) -> int:
    return 1 if level is None else count(level.find("w-start"))


def _format(level: Element | None) -> str:
    form = None if level is None else level.find("w-numFmt")
    if form is None and level is not None:  # of a choice, the one that every program knows
        form = level.find(".//Fallback/w-numFmt")
    return value(form, "decimal")
