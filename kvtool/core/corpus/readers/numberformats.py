"""Number formats of workbooks, by xlfmt; those of plain numbers, which fill whole columns, in a tenth of its time."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from math import inf

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
