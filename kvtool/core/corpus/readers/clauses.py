"""Styles of a Word document, and the automatic numbers of its clauses, headings and lists."""

from __future__ import annotations

import re
from functools import cache
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.ir import counter, integer

_NUMBER = "w-pPr/w-numPr/w-"


def find(element: Element | None, path: str) -> Element | None:
    return None if element is None else element.find(path)


def value(element: Element | None, path: str, usual: str = "") -> str:
    found = find(element, path)
    return usual if found is None else found.get("val", usual)


def count(element: Element | None, path: str, usual: int = 0) -> int:
    return integer(find(element, path), "val", usual)


def is_on(element: Element | None, path: str) -> bool:
    found = find(element, path)
    return found is not None and found.get("val") not in ("0", "false", "off")


class Styles:
    def __init__(self, root: Element | None) -> None:
        self._styles = {} if root is None else {each.get("styleId", ""): each for each in root.findall("w-style")}
        usual = (key for key, each in self._styles.items() if each.get("type") == "paragraph" and each.get("default"))
        self.usual = next(usual, "")
        self.chain = cache(self._find_chain)
        self.find = cache(self._find)

    def _find_chain(self, key: str) -> dict[str, Element]:
        found: dict[str, Element] = {}
        while key in self._styles and key not in found:
            found[key] = self._styles[key]
            key = value(found[key], "w-basedOn")
        return found

    def _find(self, key: str, path: str) -> Element | None:
        chain = self.chain(key).values()
        return next((found for style in chain if (found := style.find(path)) is not None), None)


class Clauses:
    def __init__(self, root: Element | None, styles: Styles) -> None:
        self._styles = styles
        self._lists = {} if root is None else {each.get("numId", ""): each for each in root.findall("w-num")}
        plans = [] if root is None else root.findall("w-abstractNum")
        self._plans = {each.get("abstractNumId", ""): each for each in plans}
        self._levels = cache(self._find_levels)
        self._counts: dict[str, dict[int, int]] = {}
        self._begun: set[tuple[str, int]] = set()

    def _find_levels(self, list_id: str) -> tuple[str, dict[int, Element]]:
        listed = self._lists[list_id]
        linked = value(self._plans.get(value(listed, "w-abstractNumId")), "w-numStyleLink")
        other = self._lists.get(value(self._styles.find(linked, f"{_NUMBER}numId"), "."), listed)
        plan = self._plans.get(key := value(other, "w-abstractNumId"), other)
        levels = (*plan.findall("w-lvl"), *listed.findall("w-lvlOverride/w-lvl"))
        return key, {int(at): each for each in levels if (at := each.get("ilvl", "")) in tuple("012345678")}

    def next(self, properties: Element | None, style: str) -> str | None:
        """Count a paragraph and return its number: `-` for a bullet, "" if none is shown, None outside of lists."""
        list_id, own = value(properties, "w-numPr/w-numId"), find(properties, "w-numPr/w-ilvl")
        by_style = list_id or value(self._styles.find(style, f"{_NUMBER}numId"), ".")
        if by_style not in self._lists:
            return None
        key, levels = self._levels(by_style)
        level = min(8, count(own, "."))
        if own is None and not list_id:
            names = {value(each, "w-pStyle"): at for at, each in levels.items()}
            usual = min(8, count(self._styles.find(style, f"{_NUMBER}ilvl"), "."))
            level = next((names[name] for name in self._styles.chain(style) if name in names), usual)
        return self._counted(by_style, key, levels, level)

    def _counted(self, list_id: str, key: str, levels: dict[int, Element], level: int) -> str:
        counts = self._counts.setdefault(key, {})
        start = f"w-lvlOverride[@ilvl='{level}']/w-startOverride"
        if (list_id, level) not in self._begun and find(self._lists[list_id], start) is not None:
            counts.pop(level, None)
        self._begun.add((list_id, level))
        for upper in range(level):  # a level that was skipped counts
            counts.setdefault(upper, count(levels.get(upper), "w-start"))
        first = count(self._lists[list_id], start, count(levels.get(level), "w-start"))
        counts[level] = counts.get(level, first - 1) + 1
        for lower in [lower for lower in counts if lower > level]:
            if level < count(levels.get(lower), "w-lvlRestart", lower):
                del counts[lower]
        if level not in levels or _form(levels[level]) == "bullet":
            return "-"
        is_legal = is_on(levels[level], "w-isLgl")

        def number(found: re.Match[str]) -> str:
            form = _form(levels.get(upper := int(found[1]) - 1))
            return counter(counts.get(upper, 0), "decimal" if is_legal and form != "none" else form)

        return re.sub("%([1-9])", number, value(levels[level], "w-lvlText")).strip()


def _form(level: Element | None) -> str:
    return value(level, "w-numFmt") or value(level, ".//Fallback/w-numFmt", "decimal")
