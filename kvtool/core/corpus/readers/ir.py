"""Text of the tree that office_oxide makes of an office file: nested dicts, in blocks and inline items."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from kvtool.core.corpus.readers.document import table_row

_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v"}
_ROMAN |= {4: "iv", 1: "i"}
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_ALPHABETS = {
    **dict.fromkeys(("loweralpha", "lowerletter", "alpha", "upperalpha", "upperletter"), _LATIN),
    **dict.fromkeys(("russianlower", "russianupper"), "абвгдежзиклмнопрстуфхцчшщыэюя"),
    **{"ganada": "가나다라마바사아자차카타파하", "ideographtraditional": "甲乙丙丁戊己庚辛壬癸"},
    "decimalenclosedcircle": "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳",
}
_CHINESE, _DIGITS = ("chinesecounting", "japanesecounting", "taiwanesecounting"), "〇一二三四五六七八九"
_RAISED = re.compile(r"(?:(?<=\d)(?![aeo]\b)|(?<=[^\W\d]|[)\]]))(?=[-+−–(]?\d|[-+−–(]?\w\b)")  # not 1st, 1o, Mlle
_LOWERED = re.compile(r"(?<=\d)(?=\w)|(?<=[^\W\d])(?=[^\W\d])")  # not H2O
_COMPOUND = re.compile(r".*\w[^\w.,;:)]")
_FILE_NAME = re.compile(r"\S*|[^\n]*\.\w{3,4}")
_MOST_SPAN = 1000  # columns or rows that one cell covers
_MOST_LETTERS = 30  # that are one automatic number
LONGEST_LABEL = 300  # characters of a merged cell that are repeated
Item = Mapping[str, Any]


def words(content: Iterable[Item]) -> str:
    """Join inline items to text: runs, line breaks, raised and lowered characters, marks of notes."""
    return line(map(_piece, content))


def _piece(item: Item) -> tuple[str, str]:
    if item["type"] == "text":
        return item["text"], item.get("vertical_align") or ""
    if item["type"] in ("footnote_ref", "endnote_ref"):
        return f"[{item.get('marker') or item['note_id']}]", ""
    return "\n" if item["type"] == "line_break" else "", ""


def line(pieces: Iterable[tuple[str, str]]) -> str:
    """Join texts, with `^` or `_` before a raised or lowered one that would be read as part of what it follows.

    Parameters
    ----------
    pieces : each with its position: `superscript`, `subscript`, or anything else for the usual line.
    """
    whole = ""
    for position, group in groupby((piece for piece in pieces if piece[0]), key=itemgetter(1)):
        text = "".join(text for text, _ in group)
        mark = {"superscript": _RAISED, "subscript": _LOWERED}.get(position)
        if mark is not None and mark.match(whole[-1:] + text, len(whole[-1:])):
            core = text.strip()
            text = (
                ("^" if mark is _RAISED else "_") + (f"({core})" if _COMPOUND.match(core) else core) + text[len(core) :]
            )
        whole += text
    return whole


def blocks(elements: Iterable[Item]) -> Iterator[str]:
    """Yield one text for each paragraph, heading, item of a list, row of a table, and note; text boxes in place."""
    for element in elements:
        kind = element["type"]
        if kind == "heading":
            yield f"{'#' * element['level']} {words(element['content'])}"
        elif kind == "paragraph":
            yield words(element["content"])
        elif kind == "list":
            yield from _items(element, ())
        elif kind == "table":
            yield from rows(element["rows"])
        elif kind == "text_box":
            yield from blocks(element["content"])
        elif kind in ("footnote", "endnote"):
            yield _note(element)
        elif kind == "code_block":
            yield element["content"]
        elif kind == "image":
            yield image(element.get("alt_text") or "")


def image(description: str) -> str:
    """Word the description of a picture; "" for none, and for one that is but the name of a file."""
    text = " ".join(description.split())
    return "" if _FILE_NAME.fullmatch(text) else f"[image: {text}]"


def _note(note: Item) -> str:
    """Write a note with its mark, or a comment with its author."""
    text = " ".join(" ".join(blocks(note["content"])).split())
    if note.get("author"):
        return f"[comment by {note['author']}: {text}]"
    return f"[{note.get('marker') or note['id']}] {text}"


def _items(listed: Item, above: tuple[str, ...]) -> Iterator[str]:
    """Yield a list's items with their numbers or dashes, each followed by the list inside of it."""
    for number, item in enumerate(listed["items"], listed.get("start_number") or 1):
        counted = (*above, counter(number, listed.get("style") or "decimal"))
        first, *others = [*blocks(item["content"])] or [""]
        yield f"{_marker(listed, counted)} {first}" if first.strip() else ""
        yield from others
        if item.get("nested"):
            yield from _items(item["nested"], counted)


def _marker(listed: Item, numbers: Sequence[str]) -> str:
    if not listed.get("ordered"):
        return "-"
    pattern = listed.get("marker_pattern") or f"%{len(numbers)}."
    return re.sub(r"%([1-9])", lambda found: "".join(numbers[int(found[1]) - 1 : int(found[1])]), pattern)


def counter(number: int, style: str) -> str:
    """Write an automatic number in a style: `decimal`, upper or lower `roman` or `alpha` (`lower_alpha`), those of
    Word; "" for `none`."""
    name = style.lower().replace("_", "")
    text = str(number)
    letters = _ALPHABETS.get(name, "")
    if 0 < number <= len(letters) * _MOST_LETTERS:
        text = letters[(number - 1) % len(letters)] * (1 + (number - 1) // len(letters))
    elif "roman" in name and 0 < number < 4000:
        text = ""
        for value, letters in _ROMAN.items():
            text += letters * (number // value)
            number %= value
    elif name.startswith(_CHINESE) and 0 < number < 100:
        tens, ones = divmod(number, 10)
        text = (_DIGITS[tens] if tens > 1 else "") + "十" * (tens > 0) + (_DIGITS[ones] if ones else "")
    elif name == "decimalzero":
        text = f"{number:02}"
    elif name == "ordinal":
        text += {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return "" if name == "none" else text.upper() if name.startswith(("upper", "russianupper")) else text


def rows(table: Iterable[Item]) -> Iterator[str]:
    """Yield a table's rows; a cell stands in each column and row that it covers."""
    spanning: dict[int, tuple[int, str]] = {}  # column -> rows that a cell of an earlier row still covers, its text
    for row in table:
        line = {column: text for column, (_, text) in spanning.items()}
        spanning = {column: (left - 1, text) for column, (left, text) in spanning.items() if left > 1}
        column = 0
        for cell in row["cells"]:
            text = " ".join(blocks(cell["content"]))
            while column in line:
                column += 1
            for covered in range(column, column + min(_MOST_SPAN, max(1, cell["col_span"]))):
                line[covered] = text
                text = text if len(text) <= LONGEST_LABEL else ""
                if cell["row_span"] > 1:
                    spanning[covered] = (min(_MOST_SPAN, cell["row_span"]) - 1, text)
        yield table_row(line.get(column, "") for column in range(max(line, default=-1) + 1))
