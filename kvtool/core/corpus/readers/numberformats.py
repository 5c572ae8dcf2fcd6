"""Number formats of workbooks: numbers, dates and times as Excel writes them into a cell.

xlfmt knows all of the language; formats of plain numbers, which fill whole columns with different values, are written
here, in a tenth of its time.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from math import inf
from typing import NamedTuple

GENERAL = "General"
_LOCAL = {  # formats that Excel writes as the country of its user does
    **dict.fromkeys((14, *range(27, 32), 36, *range(50, 59)), "yyyy-mm-dd"),
    **{22: "yyyy-mm-dd hh:mm", 32: "h:mm", 33: "h:mm:ss"},
}
_DAY = 86400  # seconds
_LONGEST = 255  # characters of a format in Excel
_EXACT = 1 << 53  # from where on not every whole number is a float
_LITERAL = r'(?:"[^"]*"|\\.|[_*].|\[\$[^\]]*\]|\[(?:black|blue|cyan|green|magenta|red|white|yellow)\]|[ $€£¥()+%-])*+'
_PLAIN = re.compile(rf"({_LITERAL})(?:#,##)?0(?:\.(0+))?({_LITERAL})", re.IGNORECASE)
_PIECE = re.compile(r'"([^"]*)"|\\(.)|[_*].|\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|(.)')
_STAMP = re.compile(r"([^hs;\[]*[yd][^hs;\[]*?)(\\? +h[^yd;\[.]*)", re.IGNORECASE)  # a date, then a time of the day


class _Plain(NamedTuple):
    sign: str
    before: str
    pattern: str
    unit: Decimal
    scale: int
    after: str


def code_of(number: int, own: dict[int, str]) -> str:
    """Return the format with a number: one of the workbook's `own`, or one that Excel has built in."""
    from xlrd.formatting import std_format_strings

    return own.get(number) or _LOCAL.get(number) or std_format_strings.get(number, GENERAL)


@lru_cache(maxsize=1 << 16)
def shown(value: float | str, code: str, is_1904: bool = False) -> str:
    """Write a value in a format; in the general one if the format would hide it, or is none.

    Parameters
    ----------
    value : a number, also that of a date, or a text.
    code : the format: `0.0%`.
    is_1904 : dates count from 1904, as on old Macs.
    """
    usual = value if isinstance(value, str) else _general(value)
    if code in ("", "@") or code.lower() == "general" or len(code) > _LONGEST or value in (inf, -inf) or value != value:
        return usual
    if isinstance(value, float) and value > 1 and (stamp := _STAMP.fullmatch(code)):  # most of both is in the cache
        day, second = divmod(round(value * _DAY), _DAY)
        return shown(float(day), stamp[1], is_1904) + shown(second / _DAY, stamp[2])
    from xlfmt import format_value

    try:
        if isinstance(value, float) and (plain := _plain(code, value > 0)) and value:
            number = (abs(Decimal(repr(value))) * plain.scale).quantize(plain.unit, ROUND_HALF_UP)
            return f"{plain.sign if number else ''}{plain.before}{number:{plain.pattern}}{plain.after}"
        written = str(format_value(value, code, date1904=is_1904))
    except (ArithmeticError, ValueError, TypeError, LookupError):  # a date of year 10000, a format that is none
        return usual
    hides = not written.strip() and value
    return usual if hides or set(written) == {"#"} else written


def _general(value: float) -> str:
    return f"{value + 0.0:.0f}" if value.is_integer() and abs(value) < _EXACT else f"{value:.15G}"


@lru_cache(maxsize=1 << 12)
def _plain(code: str, is_positive: bool) -> _Plain | None:
    """Return how a format writes numbers of a sign, or None if that is more than digits between fixed characters."""
    sections = code.split(";")
    section = sections[0] if is_positive or len(sections) == 1 else sections[1]
    found = _PLAIN.fullmatch(section)
    if found is None:
        return None
    pieces = {side: [*_PIECE.finditer(found[side])] for side in (1, 3)}
    before, after = (
        "".join(each[each.lastindex] if each.lastindex else "" for each in side) for side in pieces.values()
    )
    percents = sum(each[4] == "%" for side in pieces.values() for each in side)
    sign = "-" if len(sections) == 1 and not is_positive else ""
    digits = len(found[2] or "")
    pattern = f"{',' if '#,##' in section else ''}.{digits}f"
    return _Plain(sign, before, pattern, Decimal(1).scaleb(-digits), 100**percents, after)
