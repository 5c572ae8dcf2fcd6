"""Cut positions inside a paragraph: sentence ends, clauses, words, and at last anywhere.

Every position yielded here has white space or text before it and a visible character at it, so no
piece between two cuts consists of white space alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache

_SENTENCE_END = re.compile(
    # a run of stops, closing quotes, white space; possessive, so a line of dots stays linear
    r"(?<![.!?…])[.!?…]++[\"'”’)\]»*_]*+(?:\s++|(?<=[가-힣][.!?])(?=[가-힣“‘\"']))"
    r"|[。！？｡।؟]++[”’」』）】》\"')\]]*+\s*+"
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Gen|Col|Rev|Hon|No|Nos|vs|cf|al|Fig|Figs|Eq|Vol|pp|Inc|Ltd|Co"
    r"|approx|ca|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)|\b[A-Z]|\b[a-z](?:\.[a-z])+)\.\s+\Z"
)
_CLAUSE_END = re.compile(r"[,;:–—]\s++|[，；：、]++\s*+")
_SPACE = re.compile(r"\s++")
_VISIBLE = re.compile(r"\S")

_JOINERS = "\u200d\u200c"
_HARD = 60  # characters of a piece cut without any mark, at most
_HARD_LEAST = 20


def sentence_starts(text: str, start: int, end: int) -> Iterator[int]:
    """Find the starts of the second and later sentences of `text[start:end]`."""
    for match in _SENTENCE_END.finditer(text, start, end):
        cut = match.end()
        if cut < end and not _is_false_end(text, match):
            yield cut


def clause_starts(text: str, start: int, end: int) -> Iterator[int]:
    """Find the positions behind commas, colons and dashes."""
    return (m.end() for m in _CLAUSE_END.finditer(text, start, end) if m.end() < end)


def word_starts(text: str, start: int, end: int) -> Iterator[int]:
    """Find the positions behind white space."""
    return (m.end() for m in _SPACE.finditer(text, start, end) if start < m.start() and m.end() < end)


def hard_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Cut a text without marks, never inside a grapheme.

    They stand behind characters of an arbitrary eighth of Unicode, so that they depend on what
    stands there and an insertion moves only those near it.
    """
    visible = _VISIBLE.search(text, start, end)
    for match in _hard_piece().finditer(text, visible.start() if visible else end, end):
        cut = whole_grapheme(text, match.end(), end)
        if cut < end and not text[cut].isspace():
            yield cut


def middle(text: str, start: int, end: int) -> int | None:
    """Find a cut near the middle of `text[start:end]`: between graphemes, else between characters."""
    content = text[start:end].rstrip()
    first, last = start + len(content) - len(content.lstrip()) + 1, start + len(content)
    half = (first + last) // 2
    visible = [p for p in range(first, last) if not text[p].isspace()]
    visible.sort(key=lambda p: abs(p - half))
    return next((p for p in visible if not _joined(text, p)), visible[0] if visible else None)


def whole_grapheme(text: str, position: int, end: int) -> int:
    """Find the first position from `position` on that does not tear a grapheme (within 64 characters)."""
    last = min(end, position + 64)
    return next((p for p in range(position, last) if not _joined(text, p)), last)


def thinned(cuts: Iterable[int], start: int, least: int) -> Iterator[int]:
    """Leave out cuts that would make a piece of fewer than `least` characters."""
    last = start
    for cut in cuts:
        if cut - last >= least:
            last = cut
            yield cut


def _is_false_end(text: str, match: re.Match[str]) -> bool:
    """Return True if a stop ends no sentence: before a lower-case letter, or after an abbreviation or number."""
    mark = match[0].rstrip()
    if text[match.end()].islower():
        return True
    if mark != ".":
        return False
    before = text[max(0, match.start() - 12) : match.end()]
    return _ABBREVIATION.search(before) is not None


@cache
def _hard_piece() -> re.Pattern[str]:
    codes = [code for code in range(0x21, 0xFFF0) if (code * 2654435761 >> 13) % 8 == 0]
    eighth = "".join(re.escape(chr(code)) for code in codes if not 0xD800 <= code < 0xE000)
    return re.compile(f"[\\s\\S]{{{_HARD_LEAST},{_HARD - 1}}}?[{eighth}]|[\\s\\S]{{1,{_HARD}}}")


def _joined(text: str, position: int) -> bool:
    """Return True if the characters around `position` belong to one grapheme (the common cases of UAX 29)."""
    before, after = text[position - 1], text[position]
    if after < "\u0300":
        return before == "\r" and after == "\n"
    if after in _JOINERS or before == "\u200d" or unicodedata.category(after) in ("Mn", "Me", "Mc"):
        return True
    code = ord(after)
    if 0x1160 <= code <= 0x11FF:  # Hangul vowel and final jamo
        return 0x1100 <= ord(before) <= 0x11FF or 0xAC00 <= ord(before) <= 0xD7A3
    if 0x1F3FB <= code <= 0x1F3FF or 0xE0020 <= code <= 0xE007F:  # skin tones, flag tags
        return True
    return _is_flag_letter(after) and _flag_letters_before(text, position) % 2 == 1


def _is_flag_letter(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _flag_letters_before(text: str, position: int) -> int:
    count = 0
    while count < min(position, 64) and _is_flag_letter(text[position - 1 - count]):
        count += 1
    return count
