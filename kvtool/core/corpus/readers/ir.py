"""Texts that all office files share: lines, rows of tables, numbers and their formats, symbols, equations in one line
(`(a+b)/2`, `sqrt(x)`, `x^2`, `∑_(i=1)^n i`), and the tree of office_oxide (nested dicts)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.document import Document, Grid, joined
from kvtool.core.corpus.readers.html import raised

_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v"}
_ROMAN |= {4: "iv", 1: "i"}
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_ALPHABETS = {
    **dict.fromkeys(("loweralpha", "lowerletter", "alpha", "upperalpha", "upperletter"), _LATIN),
    **dict.fromkeys(("russianlower", "russianupper"), "абвгдежзиклмнопрстуфхцчшщыэюя"),
    **{"ganada": "가나다라마바사아자차카타파하", "decimalenclosedcircle": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳"},
}
_CHINESE, _DIGITS = ("chinesecounting", "japanesecounting", "taiwanesecounting"), "〇一二三四五六七八九"
_RAISED = re.compile(r"(?:(?<=\d)(?![aeo]\b)|(?<=[^\W\d]|[)\]]))(?=[-+−–(]?\d|[-+−–(]?\w\b)")  # not 1st, 1o, Mlle
_LOWERED = re.compile(r"(?<=\d)(?=\w)|(?<=[^\W\d])(?=[^\W\d])")  # not H2O
_COMPOUND = re.compile(r".*\w[^\w.,;:)]")
_FILE_NAME = re.compile(r"\S*|[^\n]*\.\w{3,4}")
PAGE = re.compile(r"[\W_]*(?:page\W*)?\d*(?:\W*of)?\W*\d*[\W_]*", re.IGNORECASE)  # a margin that only counts pages
_LONGEST_WORD = 100  # before a raised number
_MOST_SPAN = 1000  # columns or rows that one cell covers
_MOST_LETTERS = 30  # that are one automatic number
LONGEST_LABEL = 300  # characters of a merged cell that are repeated
Item = Mapping[str, Any]
Piece = tuple[str, str]
Cell = tuple[str, int, int]  # its text, and how many columns and rows it covers


def line(pieces: Iterable[Piece]) -> str:
    """Join texts; mark a `superscript` or `subscript` by `^`, `_` or, for the number of a note, brackets where it would
    be read as part of what precedes it."""
    whole = ""
    for position, group in groupby((piece for piece in pieces if piece[0]), key=itemgetter(1)):
        text = "".join(text for text, _ in group)
        mark = {"superscript": _RAISED, "subscript": _LOWERED}.get(position)
        is_number = mark is _RAISED and text[0].isdigit() and whole[-1:] not in " \n\t]"
        note = raised(whole[-_LONGEST_WORD:], text, False) if is_number else ""
        if note.startswith("["):
            text = note + text[len(text.rstrip()) :]
        elif mark is not None and mark.match(whole[-1:] + text, len(whole[-1:])):
            core = text.strip()
            sign = "^" if mark is _RAISED else "_"
            text = sign + (f"({core})" if _COMPOUND.match(core) else core) + text[len(core) :]
        whole += text
    return whole


def blocks(elements: Iterable[Item]) -> Iterator[str]:
    for element in elements:
        kind, content = element["type"], element.get("content", ())
        if kind in ("heading", "paragraph"):
            pieces = [(item.get("text", "\n"), item.get("vertical_align") or "") for item in content]
            yield "#" * element.get("level", 0) + " " * (kind == "heading") + line(pieces)
        elif kind == "list":
            yield from _items(element)
        elif kind == "table":
            yield from rows(map(_cells, element["rows"]))
        elif kind == "text_box":
            yield from blocks(content)
        elif kind in ("footnote", "endnote"):
            text, author = " ".join(" ".join(blocks(content)).split()), element.get("author")
            yield comment(text, author) if author else f"[{element.get('marker') or element['id']}] {text}"
        elif kind == "image":
            yield image(element.get("alt_text") or "")


def _items(listed: Item) -> Iterator[str]:
    """Yield a list's items, without numbers: the library counts bullets, too, and always from 1."""
    for item in listed["items"]:
        first, *others = [*blocks(item["content"])] or [""]
        yield f"- {first}" if first.strip() else ""
        yield from others
        yield from _items(item.get("nested") or {"items": ()})


def _cells(row: Item) -> list[Cell]:
    return [(" ".join(blocks(cell["content"])), cell["col_span"], cell["row_span"]) for cell in row["cells"]]


def integer(element: Element | None, name: str, usual: int = 0) -> int:
    value = "" if element is None else element.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 10 else usual


def image(description: str) -> str:
    """Describe a picture; "" for a description that is only a file's name."""
    text = " ".join(description.split())
    return "" if _FILE_NAME.fullmatch(text) else f"[image: {text}]"


def comment(text: str, author: str, cell: str = "") -> str:
    on, by = cell and f" on {cell}", author and f" by {author}"
    return f"[comment{on}{by}: {' '.join(text.split())}]"


def counter(count: int, style: str) -> str:
    name, text = style.lower().replace("_", ""), str(count)
    letters = _ALPHABETS.get(name, "")
    if 0 < count <= len(letters) * _MOST_LETTERS:
        text = letters[(count - 1) % len(letters)] * (1 + (count - 1) // len(letters))
    elif "roman" in name and 0 < count < 4000:
        text = ""
        for value, letters in _ROMAN.items():
            text += letters * (count // value)
            count %= value
    elif name.startswith(_CHINESE) and 0 < count < 100:
        tens, ones = divmod(count, 10)
        text = (_DIGITS[tens] if tens > 1 else "") + "十" * (tens > 0) + (_DIGITS[ones] if ones else "")
    elif name == "decimalzero":
        text = f"{count:02}"
    return "" if name == "none" else text.upper() if "upper" in name else text


def rows(table: Iterable[Iterable[Cell]]) -> Iterator[str]:
    grid = Grid(LONGEST_LABEL)
    for row in table:
        yield grid.row((text, min(_MOST_SPAN, width), min(_MOST_SPAN, height)) for text, width, height in row)


def framed(source: str, texts: Iterable[str | list[str]], margins: Iterable[Piece], notes: tuple[str, ...]) -> Document:
    once: dict[str, str] = {}
    for name, text in margins:
        once.setdefault(text.strip(), name)
    parts = {end: [(end, text) for text, name in once.items() if name == end] for end in ("header", "footer")}
    groups = enumerate(([each] if isinstance(each, str) else each for each in texts), 1)
    body = ((f"¶ {number}", text) for number, group in groups for text in group)
    return joined(source, "markdown", (*parts["header"], *body, *parts["footer"]), notes=notes)
