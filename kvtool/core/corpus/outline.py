"""A text's outline: headings, paragraphs, lists, tables and fences, cut into the units of KVSplit. A paragraph is cut
at sentence ends, clauses, words, and at last anywhere, but no piece is only white space."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from itertools import pairwise


class Level(IntEnum):
    HARD = 0
    WORD = 1
    CLAUSE = 2
    ROW = 3  # a line inside a table, a fence or an indented block of code
    SENTENCE = 4
    LINE = 5
    PARAGRAPH = 6
    SECTION = 7


@dataclass(frozen=True, slots=True)
class Unit:
    start: int
    end: int
    level: Level
    finest: Level
    heading: bool = False


@dataclass(slots=True)
class _Block:
    start: int
    level: Level
    form: str  # heading, prose, table, fence, code
    lines: list[int]  # starts of its lines
    end: int = 0


_LINE = re.compile(r"[^\r\n]*+(?:\r\n?|\n|\Z)")
_ATX = re.compile(r" {0,3}#{1,6}(?:[ \t]|$)", re.MULTILINE)
_UNDERLINE = re.compile(r" {0,3}(?:={2,}|-{2,})[ \t]*$", re.MULTILINE)
_RST_UNDERLINE = re.compile(r"([=\-~^\"'#*+`.:_])\1{2,}[ \t]*$", re.MULTILINE)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_TABLE = re.compile(r"[ \t]*\||[^|\n]*[^|\s][ \t]\|[ \t]")
_ITEM = re.compile(r"[ \t]*(?:[-*+•·‣◦]|\d{1,3}[.)]|[A-Za-z][.)]|\(\w{1,3}\)|[①-⑳가-하]\.)[ \t]")
_TITLE = re.compile(
    r"(?:(?:chapter|section|part|article|appendix)[ \t]+[\dIVXLA-Z]+\b|\d{1,3}(?:\.\d{1,3})*\.?[ \t]+\S"
    r"|[IVXLC]+\.[ \t]|제[ \t]*\d+[ \t]*[장절조편부]|第.{1,4}[章节節条部編])",
    re.IGNORECASE,
)
_CLOSER = re.compile(r"[)\]}]|(?:else|elif|except|finally|end|catch)\b")
_FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
_LONGEST_TITLE = 80
_NARROW, _WIDE, _FULL = 40, 130, 0.7  # characters of a wrapped paragraph's longest line; a full line's share of that
_CUT_BY_LINES = ("table", "fence", "code")

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


def units(text: str, kind: str) -> list[Unit]:
    return [unit for block in _blocks(text, kind) for unit in _block_units(text, block)]


def paragraphs(text: str, kind: str) -> list[Unit]:
    return [_whole(block) for block in _blocks(text, kind)]


def words(text: str, kind: str) -> list[Unit]:
    del kind
    whole = Unit(0, len(text), Level.PARAGRAPH, Level.CLAUSE)
    found = finer(text, whole)
    return [piece for word in found for piece in (finer(text, word) if word.end - word.start > _HARD else [word])]


def finer(text: str, unit: Unit) -> list[Unit]:
    for level in sorted((level for level in _CUTS if level < unit.finest), reverse=True):
        if len(pieces := _cut_at(text, unit, level)) > 1:
            return pieces
    half = _middle(text, unit.start, unit.end)
    return [unit] if half is None else _cut(unit, (half,), Level.HARD)


def _line_starts(text: str, start: int, end: int) -> Iterator[int]:
    above = False  # a line that is not blank precedes
    for match in _LINE.finditer(text, start, end):
        if match[0].strip():
            if above:
                yield match.start()
            above = True


def _sentence_starts(text: str, start: int, end: int) -> Iterator[int]:
    ends = (match for match in _SENTENCE_END.finditer(text, start, end) if match.end() < end)
    return (match.end() for match in ends if not _is_false_end(text, match))


def _clause_starts(text: str, start: int, end: int) -> Iterator[int]:
    return (m.end() for m in _CLAUSE_END.finditer(text, start, end) if m.end() < end)


def _word_starts(text: str, start: int, end: int) -> Iterator[int]:
    return (m.end() for m in _SPACE.finditer(text, start, end) if start < m.start() and m.end() < end)


def _hard_cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Cut after characters of an arbitrary eighth of Unicode, so an insertion moves only the cuts near it."""
    visible = _VISIBLE.search(text, start, end)
    for match in _hard_piece().finditer(text, visible.start() if visible else end, end):
        cut = _whole_grapheme(text, match.end(), end)
        if cut < end and not text[cut].isspace():
            yield cut


def _middle(text: str, start: int, end: int) -> int | None:
    content = text[start:end].rstrip()
    first, last = start + len(content) - len(content.lstrip()) + 1, start + len(content)
    half = (first + last) // 2
    visible = [p for p in range(first, last) if not text[p].isspace()]
    visible.sort(key=lambda p: abs(p - half))
    return next((p for p in visible if not _joined(text, p)), visible[0] if visible else None)


def _whole_grapheme(text: str, position: int, end: int) -> int:
    last = min(end, position + 64)
    return next((p for p in range(position, last) if not _joined(text, p)), last)


def _is_false_end(text: str, match: re.Match[str]) -> bool:
    if text[match.end()].islower():
        return True
    before = text[max(0, match.start() - 12) : match.end()]
    return match[0].rstrip() == "." and _ABBREVIATION.search(before) is not None


@cache
def _hard_piece() -> re.Pattern[str]:
    codes = [code for code in range(0x21, 0xFFF0) if (code * 2654435761 >> 13) % 8 == 0]
    eighth = "".join(re.escape(chr(code)) for code in codes if not 0xD800 <= code < 0xE000)
    return re.compile(f"[\\s\\S]{{{_HARD_LEAST},{_HARD - 1}}}?[{eighth}]|[\\s\\S]{{1,{_HARD}}}")


def _joined(text: str, position: int) -> bool:
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
    above = text[max(0, position - 64) : position]
    return after in _FLAG_LETTERS and (len(above) - len(above.rstrip(_FLAG_LETTERS))) % 2 == 1


# level → (where it cuts, the fewest characters of a piece)
_CUTS: dict[Level, tuple[Callable[[str, int, int], Iterator[int]], int]] = {
    Level.SENTENCE: (_sentence_starts, 6),
    Level.ROW: (_line_starts, 1),
    Level.CLAUSE: (_clause_starts, 24),
    Level.WORD: (_word_starts, 12),
    Level.HARD: (_hard_cuts, 1),
}


def _cut_at(text: str, unit: Unit, level: Level) -> list[Unit]:
    find_cuts, least = _CUTS[level]
    starts, last = [], unit.start
    for cut in find_cuts(text, unit.start, unit.end):
        if cut - last >= least:
            starts.append(last := cut)
    return _cut(unit, starts, level)


def _cut(unit: Unit, starts: Iterable[int], level: Level) -> list[Unit]:
    edges = [unit.start, *starts, unit.end]
    first = Unit(edges[0], edges[1], unit.level, level, unit.heading and len(edges) == 2)
    return [first, *(Unit(start, end, level, level) for start, end in pairwise(edges[1:]))]


def _block_units(text: str, block: _Block) -> list[Unit]:
    whole = _whole(block)
    if block.form == "code":
        first, *others = _cut(whole, block.lines[1:], Level.ROW)
        inner = (each if _is_inner(text, each.start) else replace(each, level=Level.SENTENCE) for each in others)
        return [first, *inner]
    if block.form != "prose":
        return [whole]
    wrapped = _wrapped(text, block)
    starts = (start for start in block.lines[1:] if start not in wrapped or _ITEM.match(text, start))
    sentences = (each for line in _cut(whole, starts, Level.LINE) for each in _cut_at(text, line, Level.SENTENCE))
    # what is left of a wrapped paragraph has line ends that mean no more than spaces
    return [replace(sentence, finest=Level.ROW) for sentence in sentences]


def _is_inner(text: str, start: int) -> bool:
    return text[start] in " \t" or _CLOSER.match(text, start) is not None


def _whole(block: _Block) -> Unit:
    finest = Level.SENTENCE if block.form in _CUT_BY_LINES else Level.LINE
    return Unit(block.start, block.end, block.level, finest, block.form == "heading")


def _wrapped(text: str, block: _Block) -> set[int]:
    lengths = [after - start for start, after in pairwise(block.lines)]
    longest = max(lengths, default=0)
    if not _NARROW <= longest <= _WIDE:
        return set()
    after = [start for start, size in zip(block.lines[1:], lengths, strict=True) if size >= longest * _FULL]
    return set(after) if sum(_goes_on(text[start]) for start in after) * 3 >= len(after) else set()


def _goes_on(char: str) -> bool:
    return char.islower() or "\u3040" <= char <= "\u9fff" or "가" <= char <= "힣"


def _blocks(text: str, kind: str) -> list[_Block]:
    outliner = _Outliner(text, kind)
    for match in filter(lambda match: match[0], _LINE.finditer(text)):
        outliner.line(match.start(), match.end())
    return outliner.finished()


class _Outliner:
    """Reads line by line; blank lines belong to the block above them, leading ones to the first."""

    def __init__(self, text: str, kind: str) -> None:
        self._text = text
        self._code = kind == "code"
        self._marked = kind in ("markdown", "html")
        self._blocks: list[_Block] = []
        self._fence = ""
        self._gap = True

    def line(self, start: int, end: int) -> None:
        blank = self._text[start:end].isspace()
        if self._fence:
            self._in_fence(start, blank)
        elif blank:
            self._gap = True
        else:
            self._filled_line(start, end)

    def finished(self) -> list[_Block]:
        for block, after in pairwise(self._blocks):
            block.end = after.start
        if self._blocks:
            self._blocks[0].start = self._blocks[0].lines[0] = 0
            self._blocks[-1].end = len(self._text)
        return self._blocks

    def _in_fence(self, start: int, blank: bool) -> None:
        block = self._blocks[-1]
        if not blank:
            block.lines.append(start)
            match = _FENCE.match(self._text, start)
            if match and match[1].startswith(self._fence):
                self._fence, self._gap = "", False

    def _filled_line(self, start: int, end: int) -> None:
        last = self._blocks[-1] if self._blocks else None
        if self._is_underline(start, last):
            assert last is not None
            last.form, last.level = "heading", Level.SECTION
            last.lines.append(start)
            return
        form = self._form(start, end)
        if self._gap or last is None or last.form != form or form in ("heading", "fence"):
            is_inner = not self._gap or (form == "code" and _is_inner(self._text, start))
            level = Level.SECTION if form == "heading" else Level.LINE if is_inner else Level.PARAGRAPH
            self._blocks.append(_Block(start, level, form, [start]))
            self._gap = False
        else:
            last.lines.append(start)

    def _form(self, start: int, end: int) -> str:
        if self._code:
            return "code"
        fence = _FENCE.match(self._text, start)
        if fence and self._marked:
            self._fence = fence[1]
            return "fence"
        if _ATX.match(self._text, start) and (self._marked or self._gap):
            return "heading"
        if self._marked and _TABLE.match(self._text, start, end):
            return "table"
        return "heading" if not self._marked and self._is_title(start, end) else "prose"

    def _is_title(self, start: int, end: int) -> bool:
        """Return True for a title in plain text: `Chapter 3`, `2.1 Scope`, `제3장` or capitals between blank lines."""
        line = self._text[start:end].strip()
        below = _LINE.match(self._text, end)
        ends_blank = below is not None and below.end() < len(self._text) and not below[0].strip()
        if not self._gap or len(line) > _LONGEST_TITLE or not ends_blank or line[-1] in '.!?。,;:…"':
            return False
        return bool(_TITLE.match(line)) or (line.isupper() and len(line) > 3)

    def _is_underline(self, start: int, last: _Block | None) -> bool:
        if self._gap or last is None or last.form != "prose" or len(last.lines) != 1:
            return False
        match = (_UNDERLINE if self._marked else _RST_UNDERLINE).match(self._text, start)
        title = self._text[last.start : start].strip()
        return match is not None and (self._marked or len(match[0].strip()) >= len(title) - 2)
