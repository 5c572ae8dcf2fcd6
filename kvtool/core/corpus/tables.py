"""Long tables: every chunk that begins inside of one repeats its header rows in the document's text."""

from __future__ import annotations

import csv
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.split import CountTokens, Span, SplitSettings, split

_LINE = re.compile(r"[^\n]*+\n?")
_ROW = re.compile(r"[ \t]*\||[^|\n]*[^|\s][ \t]\|")
_RULE = re.compile(r"\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?")
_QUOTED = re.compile(r'(?:\A|(?<=[,;\t|\n]))"(?:[^"]++|"")*+"(?=[,;\t|\r\n]|\Z)')
_CELL = re.compile(r"(?<!\\)\|")
_NUMBER = re.compile(r"[-+−]?[ $€£¥]*+\d[\d.,' ]*+[ %€$£¥]*+")
_DIGITS = re.compile(r"\d+")
_YEAR = re.compile(r"(?:19|20)\d\d")
_DELIMITERS = ",;\t|"
_SAMPLE, _SAMPLE_LINES = 1 << 16, 40  # characters and lines of a CSV file by which its delimiter is recognised
_SAMPLE_ROWS = 20  # of a table, by which its headings are recognised
_HEADER_ROWS = 3  # a title or a group of headings may precede the headings
_FEWEST_ROWS = 3
_LONGEST_HEADING = 200  # characters
_LONGEST_TOKEN = 16  # characters; longer headers are not counted, since a tokenizer is quadratic on some lines
_SEAM = 4  # tokens by which a header and its rows may together have more than each alone


@dataclass(frozen=True, slots=True)
class _Table:
    start: int
    body: int
    end: int


def split_document(
    document: Document, settings: SplitSettings, count_tokens: CountTokens
) -> tuple[Document, list[Span]]:
    spans = split(document.text, settings, count_tokens, document.kind)
    most_header = _LONGEST_TOKEN * settings.max_tokens
    tables = [] if len(spans) < 2 else [each for each in _tables(document) if each.body - each.start < most_header]
    sizes = count_tokens([document.text[table.start : table.body].strip() for table in tables])
    fitting = {table: size for table, size in zip(tables, sizes, strict=True) if 2 * size <= settings.max_tokens}
    starts = [span.start for span in spans]
    cut = [table for table in fitting if bisect_left(starts, table.body) < bisect_left(starts, table.end)]
    if not cut:
        return document, spans
    room = max(fitting[table] for table in cut)
    most = max(1, settings.max_tokens - room - _SEAM)
    narrow = replace(settings, max_tokens=most, min_tokens=min(settings.min_tokens, most))
    narrowed = _narrowed(document, spans, cut, lambda part: split(part, narrow, count_tokens, document.kind))
    if document.kind == "table":
        narrowed = _at_records(document.text, narrowed, lambda part: count_tokens([part.strip()])[0] <= most)
    return _with_headers(document, narrowed, [table for table, size in fitting.items() if size <= room])


def _narrowed(
    document: Document, spans: Sequence[Span], tables: Iterable[_Table], divide: Callable[[str], list[Span]]
) -> list[Span]:
    made: list[Span] = []
    done = 0  # spans
    for table in tables:
        first = max(done, bisect_right(spans, table.start, key=lambda span: span.start) - 1)
        last = bisect_left(spans, table.end, key=lambda span: span.start)
        if first < last:
            start = spans[first].start
            parts = divide(document.text[start : spans[last - 1].end])
            made += [*spans[done:first], *(Span(start + part.start, start + part.end) for part in parts)]
            done = last
    return [*made, *spans[done:]]


def _at_records(text: str, spans: Sequence[Span], fits: Callable[[str], bool]) -> list[Span]:
    """Move starts inside of a row of several lines to its start or its end, where the chunks still fit."""
    starts, rows = [span.start for span in spans], _long_rows(text)
    for number, span in enumerate(spans):
        if (row := _row_at(rows, span.start)) is not None:
            if starts[number - 1] < row.start and fits(text[row.start : span.end]):
                starts[number] = row.start
            elif row.end < span.end and fits(text[starts[number - 1] : row.end]):
                starts[number] = row.end
    return [Span(start, end) for start, end in pairwise([*starts, len(text)])]


def _long_rows(text: str) -> list[Span]:
    rows: list[Span] = []
    for cell in _QUOTED.finditer(text):
        end = text.find("\n", cell.end()) + 1 or len(text)
        if rows and cell.start() < rows[-1].end:
            rows[-1] = Span(rows[-1].start, max(end, rows[-1].end))
        elif "\n" in cell[0]:
            rows.append(Span(text.rfind("\n", 0, cell.start()) + 1, end))
    return rows


def _row_at(rows: Sequence[Span], at: int) -> Span | None:
    number = bisect_left(rows, at, key=lambda row: row.start) - 1
    return rows[number] if number >= 0 and at < rows[number].end else None


def _with_headers(document: Document, spans: list[Span], tables: list[_Table]) -> tuple[Document, list[Span]]:
    text, added = document.text, 0
    inserted, parts, moved = list[tuple[int, int]](), list[str](), list[Span]()
    for span, at in zip(spans, _row_starts(document, spans), strict=True):
        table = tables[max(0, bisect_right(tables, at, key=lambda table: table.start) - 1)]
        header = ""
        if table.body <= at < table.end:
            header = text[table.start : table.body]
            inserted.append((at, len(header)))
        parts += [text[span.start : at], header, text[at : span.end]] if header else [text[span.start : span.end]]
        moved.append(Span(span.start + added, span.end + added + len(header)))
        added += len(header)
    if not inserted:
        return document, spans
    ends, sums = [at for at, _ in inserted], [0, *accumulate(length for _, length in inserted)]
    marks = document.marks or line_marks(text)
    marks = tuple(Mark(mark.start + sums[bisect_left(ends, mark.start)], mark.place) for mark in marks)
    return replace(document, text="".join(parts), marks=marks), moved


def _row_starts(document: Document, spans: Iterable[Span]) -> Iterator[int]:
    """Yield where the first line of each chunk begins, or −1 inside of a line or a quoted cell."""
    text = document.text
    rows = _long_rows(text) if document.kind == "table" else []
    for span in spans:
        part = text[span.start : span.end]
        at = span.start + len(part) - len(part.lstrip())
        yield -1 if _row_at(rows, at) or text[text.rfind("\n", 0, at) + 1 : at].strip() else at


def line_marks(text: str) -> Iterator[Mark]:
    for number, found in enumerate(_LINE.finditer(text), 1):
        if found[0].strip():
            yield Mark(found.start(), number)


def _tables(document: Document) -> list[_Table]:
    if document.kind == "table":
        return [*_delimited(document.text)]
    if document.kind == "code":
        return []
    return [table for rows in _runs(document.text) if (table := _headed(document.text, rows)) is not None]


def _runs(text: str) -> Iterator[list[Span]]:
    run: list[Span] = []
    for found in _LINE.finditer(text + "\n"):
        if "|" in found[0]:
            run.append(Span(found.start(), min(found.end(), len(text))))
        elif run:
            if _rule_of(text, run):
                yield run
            else:
                by_form = groupby(run, lambda line: bool(_ROW.match(text, line.start, line.end)))
                yield from ([*lines] for is_row, lines in by_form if is_row)
            run = []


def _rule_of(text: str, run: Sequence[Span]) -> int:
    """Which of the first lines is a rule of Markdown, below its header; 0: none."""
    lines = (text[line.start : line.end].strip() for line in run[: _HEADER_ROWS + 1])
    return next((at for at, line in enumerate(lines) if _RULE.fullmatch(line)), 0)


def _headed(text: str, run: list[Span]) -> _Table | None:
    rows = [_cells(text[row.start : row.end].strip()) for row in run[: _SAMPLE_ROWS + _HEADER_ROWS]]
    last = _rule_of(text, run) or _last_heading(rows)
    if len(run) < _FEWEST_ROWS or last is None:
        return None
    return _Table(run[0].start, run[last].end, run[-1].end)


def _cells(line: str) -> list[str]:
    inner = line.removeprefix("|")
    return [cell.strip() for cell in _CELL.split(inner.removesuffix("|") if inner != line else inner)]


def _last_heading(rows: Sequence[Sequence[str]]) -> int | None:
    last = None
    for at, row in enumerate(rows[:_HEADER_ROWS]):
        body = rows[at + 1 :]
        if body and _is_heading(row, body) and (last is None or _heads_numbers(row, body)):
            last = at
        elif last is not None:
            break
    return last


def _is_heading(row: Sequence[str], body: Sequence[Sequence[str]]) -> bool:
    """Return True if cells are different, short and unlike those below; years and 1, 2, 3 may head other numbers."""
    named = [cell for cell in row if cell]
    if len(set(named)) < 2 or max(map(len, named)) > _LONGEST_HEADING:
        return False
    numbers = [int(cell) for cell in named if cell.isdecimal() and len(cell) < 9]
    counts = len(named) > len(numbers) > 2 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    for cell, below in _columns(row, body):
        alike = sum(_shape(other) == _shape(cell) for other in below) * 2 > len(below)
        if cell in below and not counts:
            return False
        if cell and alike and not counts and not any(map(str.isalpha, cell)):
            return False
    return True


def _heads_numbers(row: Sequence[str], body: Sequence[Sequence[str]]) -> bool:
    columns = ((cell, below) for cell, below in _columns(row, body) if cell)
    heads = {cell for cell, below in columns if sum(_shape(other) == "0" for other in below) * 2 > len(below)}
    return len(heads) > 1 and not any("0" in _shape(cell) for cell in heads)


def _columns(row: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    for column, cell in enumerate(row):
        yield cell, [other[column] for other in body if column < len(other) and other[column]]


@lru_cache(1024)
def _shape(cell: str) -> str:
    if _YEAR.fullmatch(cell):
        return "year"
    return "0" if _NUMBER.fullmatch(cell) else _DIGITS.sub("0", cell)


def _delimited(text: str) -> Iterator[_Table]:
    lines = [found[0] for found in _LINE.finditer(text, 0, _SAMPLE) if found[0]][:_SAMPLE_LINES]
    rows = max((_parsed(lines, delimiter) for delimiter in _DELIMITERS), key=_regularity)
    width, _ = _regularity(rows)
    first = next((at for at, (row, _) in enumerate(rows) if len(row) == width), 0)
    last = _last_heading([row for row, _ in rows[first:]]) if width > 1 else None
    if last is not None:
        start = rows[first - 1][1] if first else 0
        start += len(text[start:]) - len(text[start:].lstrip("\r\n"))
        yield _Table(start, rows[first + last][1], len(text))


def _parsed(lines: Sequence[str], delimiter: str) -> list[tuple[list[str], int]]:
    rows: list[tuple[list[str], int]] = []
    ends = [0, *accumulate(map(len, lines))]
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    with suppress(csv.Error):
        for row in reader:
            cells = [cell.strip() for cell in row]
            rows += [(cells, ends[reader.line_num])] if any(cells) else []
    return rows


def _regularity(rows: Sequence[tuple[list[str], int]]) -> tuple[int, int]:
    (width, count), *_ = Counter(len(row) for row, _ in rows).most_common(1) or [(0, 0)]
    return (width, count) if width > 1 else (0, 0)
