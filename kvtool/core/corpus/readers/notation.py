"""Superscripts and subscripts in plain text."""

from __future__ import annotations

import re

_BASE = re.compile(  # of an exponent: a number, a unit, a function, or brackets without words
    r"(?:\d|(?<![^\W\d_])(?:[^\W\d_]{1,2}|sin|cos|tan|log|exp|mol|min|sec)|\((?![^()]*[^\W\d_]{3})[^()]*\))$"
)
_YEAR = re.compile(r"(?<![\d.,])(?:1[5-9]|20)\d\d$")
_MARK = re.compile(r"[^\W\d_]|\d{1,3}(?:[\s,;–-]+\d{1,3})*|[ivx]{1,5}")  # of a note


def raised(before: str, text: str, is_link: bool) -> str:
    """Write what stands above the line: 10^6, a note's mark as [1], an ordinal as it is.

    Parameters
    ----------
    before : the text before it, at least its last word.
    is_link : it leads somewhere, as a note's mark does.
    """
    text = " ".join(text.split())
    if is_link and _MARK.fullmatch(text):
        return f"[{text}]"
    if re.search(r"[+−=*/-]", text) and re.match(r"[\w+−-]", text):
        return "^" + (text if re.fullmatch(r"\W?\w+\W?", text) else f"({text})")
    if _MARK.fullmatch(text) and text[0].isdigit():
        if _BASE.search(before) and not _YEAR.search(before):
            return f"^{text}"
        return text if before[-1:].isspace() else f"[{text}]"
    if len(text) == 1 and text.isalpha():
        if re.search(r"[^\W\d_]{3}$|[.,;:]$", before):
            return f"[{text}]"
        return text if text in "eoards" else f"^{text}"
    return text


def lowered(before: str, text: str) -> str:
    """Write what stands below the line after a text: x_i, log_2; H2O as it is."""
    text = " ".join(text.split())
    if re.search(r"\d$|[^\W\d_]{3}$" if text[:1].isdigit() else r"\d$|(?<![^\W\d_])[a-zα-ω]$|[a-z]{3}$", before):
        return "_" + (text if re.fullmatch(r"\w+", text) else f"({text})")
    return text
