"""Texts that all office files share: lines, rows of tables, numbers and their formats, symbols, equations in one line
(`(a+b)/2`, `sqrt(x)`, `x^2`, `∑_(i=1)^n i`), and the tree of office_oxide (nested dicts)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from itertools import groupby
from math import inf
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


GENERAL = "General"
_LOCAL = {  # formats that Excel writes as the country of its user does
    **dict.fromkeys((14, *range(27, 32), 36, *range(50, 59)), "yyyy-mm-dd"),
    **{22: "yyyy-mm-dd hh:mm", 32: "h:mm", 33: "h:mm:ss"},
}
_LONGEST = 255  # characters of a format in Excel
_EXACT = 1 << 53  # from where on not every whole number is a float
_LITERAL = r'((?:"[^"]*"|\\.|[_*].|\[\$[^\]]*\]|\[(?:black|blue|cyan|green|magenta|red|white|yellow)\]|[ $€£¥()+-])*+)'
_PLAIN = re.compile(rf"{_LITERAL}(#,##)?0(?:\.(0+))?(%?){_LITERAL}", re.IGNORECASE)
_QUOTED = r'"[^"]*"?|\\.|[_*].|\[[^\]]*\]'
_SECTION = re.compile(rf"(?:{_QUOTED}|[^;])+")
_DATE = re.compile(rf"(?:\[(?![hms]+\])[^\]]*\]|(?!\[){_QUOTED}|[^ymdhs])*+[ymdhs]", re.IGNORECASE)
_NUMBER_DOT = re.compile(rf"({_QUOTED})|\.(?=[^0#?]*$)")
_DATE_DOT = re.compile(rf"((?:s|\[s+\])\.0+|{_QUOTED})|\.|g+|e+|a{{3,4}}", re.IGNORECASE)
_RULE = re.compile(r"\[[<=>]")  # for which values a section is: those of both signs, unless it compares with 0
_ZERO_RULE = re.compile(r"\[[<=>]+-?0\.?0*\]")
_SIGNED = re.compile(r"[-(]|^[^1-9]*$")
_PIECE = re.compile(r'"([^"]*)"|\\(.)|[_*].|\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|(.)')


def code_of(number: int, own: dict[int, str]) -> str:
    from xlrd.formatting import std_format_strings

    return own.get(number) or _LOCAL.get(number) or std_format_strings.get(number, GENERAL)


@lru_cache(maxsize=1 << 16)
def shown(value: float | str, code: str, is_1904: bool = False) -> str:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    usual = value if isinstance(value, str) else f"{value + 0.0:.0f}" if is_whole else f"{value:.15G}"
    if code in ("", "@") or code.lower() == "general" or len(code) > _LONGEST or value in (inf, -inf) or value != value:
        return usual
    from xlfmt import format_value

    try:
        code = _mended(code)
        first, *others = code.split(";")
        has_rule = _RULE.search(code) is not None
        if isinstance(value, float) and value and not has_rule:
            if plain := _PLAIN.fullmatch(others[0] if others and value < 0 else first):
                before, after = (_PIECE.sub(r"\1\2\3\4", plain[side]) for side in (1, 5))
                places = len(plain[3] or "")
                number = abs(Decimal(repr(value))) * (100 if plain[4] else 1)
                number = number.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
                sign = "-" if number and value < 0 and not others else ""
                return f"{sign}{before}{number:{',' if plain[2] else ''}.{places}f}{plain[4]}{after}"
            if others and value < 0 and "general" in others[0].lower():
                value, code = -value, others[0]  # the section has a sign of its own
        written = str(format_value(value, code, date1904=is_1904))
        is_negative = has_rule and isinstance(value, float) and value < 0
        if is_negative and (len(others) == 1 or _RULE.search("".join(others[:1]))) and not _ZERO_RULE.search(code):
            written = written if _SIGNED.search(written) else f"-{written}"
    except (ArithmeticError, ValueError, TypeError, LookupError):  # a date of year 10000, a format that is none
        return usual
    hides = not written.strip() and value
    return usual if hides or set(written) == {"#"} else written


@lru_cache(1024)
def _mended(code: str) -> str:
    """Rewrite a format so that xlfmt loses none of its dots, weekdays (`aaa`) and years of an era (`ggge`)."""

    def mended(found: re.Match[str]) -> str:
        return found[1] or {".": "\\.", "g": "", "e": "yyyy"}.get(found[0][0].lower(), "d" * len(found[0]))

    return _SECTION.sub(lambda each: (_DATE_DOT if _DATE.match(each[0]) else _NUMBER_DOT).sub(mended, each[0]), code)


_SYMBOL = (
    "\u0020!∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
    + "\u0000" * 33
    + "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\u0000〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
)
_FONTS = {  # from the codes U+F020 on
    "symbol": {0xF020 + at: each for at, each in enumerate(_SYMBOL) if each != "\u0000"},
    "wingdings": {0xF000 + ord(at): each for at, each in zip("lnoqrx§¨Øàèûüýþ", "●■☐☐☐☒▪☐➢→→✗✓☒☑", strict=True)},
    "wingdings 2": {0xF000 + ord(at): each for at, each in zip("OPQRST£", "✗✓☒☑☒☒☐", strict=True)},
}


def symbol(code: str, font: str) -> str:
    number = int(code, 16) if re.fullmatch("[0-9A-Fa-f]{2,4}", code) else 0
    return glyphs(chr(number + 0xF000 * (0x20 <= number < 0x100)), font) if number else ""


def glyphs(text: str, font: str) -> str:
    return text.translate(_FONTS.get(font.lower(), _FONTS["symbol"]))


_SIMPLE = re.compile(r"\d+(?:[.,]\d+)?|[^\W\d_]+|\([^()]*\)|.?")
_MARKS = {  # before the second part, and before the third
    **dict.fromkeys(("f", "mfrac"), "/"),
    **dict.fromkeys(("sSub", "msub", "limLow", "munder"), "_"),
    **dict.fromkeys(("sSup", "msup", "limUpp", "mover"), "^"),
    **dict.fromkeys(("sSubSup", "msubsup", "munderover"), "_^"),
}
_LISTS = {"m": "; ", "mtable": "; ", "mr": ", ", "mtr": ", ", "eqArr": "; ", "oMathPara": "\n"}
_UNSEEN = ("w-del", "w-moveFrom", "annotation", "annotation-xml")


def linear(element: Element) -> str:
    name = _name(element)
    children = [each for each in element if not _name(each).endswith("Pr") and _name(each) not in _UNSEEN]
    parts = [linear(each) for each in children]
    if name in _LISTS:
        text = _LISTS[name].join(filter(None, parts))
        return f"[{text}]" if name in ("m", "mtable") else text
    *before, last = [part.strip() for part in parts] or [""]
    if name in _MARKS and before:
        is_choice = name == "f" and _property(element, "type", "") == "noBar"
        return f"{before[0]} choose {last}" if is_choice else _marked(_grouped(before[0]), name, [*before[1:], last])
    if name in ("nary", "sPre"):
        sign = _property(element, "chr", "∫") if name == "nary" else ""
        return f"{_marked(sign, 'sSubSup', before)} {last}"
    if name in ("rad", "mroot"):
        degree, inside = ("".join(before), last) if name == "rad" else (last, "".join(before))
        return f"sqrt{degree and f'[{degree}]'}({inside})"
    if name == "d":
        inside = _property(element, "sepChr", "|").join(parts)
        return _property(element, "begChr", "(") + inside + _property(element, "endChr", ")")
    if name == "func":
        function = "".join(before)
        return function + " " * (not (function.isalnum() and last.startswith(("(", "[", "{")))) + last
    if name in ("acc", "bar"):
        return last + (_property(element, "chr", "\u0302") if name == "acc" else "\u0305")
    text = _joined(element, zip(children, parts, strict=True))
    return f"sqrt({text})" if name == "msqrt" else text


def _name(element: Element) -> str:
    return element.tag.rpartition(":")[2].removeprefix("m-")


def _joined(element: Element, parts: Iterable[tuple[Element, str]]) -> str:
    text, was_run = (element.text or "") if _name(element) == "t" else (element.text or "").strip(), True
    for child, part in parts:
        ends = text[-1:].isalnum() or text.endswith(")")
        text += " " if ends and part[:1].isalnum() and (not was_run or child.tag == "m-func") else ""
        text, was_run = text + part, child.tag in ("m-r", "m-t") if part else was_run
    return text


def _grouped(text: str) -> str:
    return text if _SIMPLE.fullmatch(text) else f"({text})"


def _marked(base: str, name: str, others: Iterable[str]) -> str:
    return base + "".join(f"{mark}{_grouped(part)}" for mark, part in zip(_MARKS[name], others, strict=False) if part)


def _property(element: Element, name: str, usual: str) -> str:
    found = element.find(f"{element.tag}Pr/m-{name}")
    return usual if found is None else found.get("val", "")
