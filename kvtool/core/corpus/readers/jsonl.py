"""JSON lines: one document a line; a broken line is noted and the others are read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.encoding import of_text

_TEXT_KEYS = ("text", "content", "body", "passage")
_MOST_NOTES = 20
_LONGEST_LABEL = 1000  # characters; a longer id names nothing


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    label: str  # the id as given, or empty
    text: str
    notes: tuple[str, ...]


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document for each line that holds a text.

    Raises
    ------
    UnreadableFile
        If no line holds one.
    """
    rows, broken = _rows(text)
    if not rows:
        raise UnreadableFile(f"no line is a JSON object with a text: {broken[0]}")
    notes = [*broken, *(f"line {row.line}: {note}" for row in rows for note in row.notes)]
    labels = _labels(rows)
    return [
        Document(
            f"{source}#{label}",
            row.text,
            "text",
            _shortened(notes) if row is rows[0] else (),
            (Mark(0, row.line),),
        )
        for row, label in zip(rows, labels, strict=True)
    ]


def _rows(text: str) -> tuple[list[_Row], list[str]]:
    rows: list[_Row] = []
    broken: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, _BrokenRowError) else "not JSON"
            broken.append(f"line {number} left out: {reason}")
    return rows, broken


class _BrokenRowError(ValueError):
    pass


def _row(number: int, value: object) -> _Row:
    if not isinstance(value, dict):
        raise _BrokenRowError("not a JSON object")
    text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
    if text is None:
        raise _BrokenRowError(f"no string under {', '.join(_TEXT_KEYS)}")
    if not text.strip():
        raise _BrokenRowError("empty text")
    title = value.get("title")
    full = f"{title}\n\n{text}" if isinstance(title, str) and title.strip() else text
    clean = _without_surrogates(full)
    notes = () if clean == full else ("lone surrogates replaced by U+FFFD",)
    return _Row(number, _label(value.get("id")), clean, notes)


def _without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs: JSON may escape them, but no encoding and no tokenizer takes them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _label(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    label = _without_surrogates(str(value))
    return label if len(label) <= _LONGEST_LABEL else ""


def _labels(rows: list[_Row]) -> list[str]:
    """Return each row's id if no other row has it, else its line number; all differ."""
    counts = Counter(row.label for row in rows)
    unique = {label for label, count in counts.items() if label and count == 1}
    return [row.label if row.label in unique else _free(str(row.line), unique) for row in rows]


def _free(label: str, taken: set[str]) -> str:
    while label in taken:
        label = f"line {label}"
    return label


def _shortened(notes: list[str]) -> tuple[str, ...]:
    if len(notes) <= _MOST_NOTES:
        return tuple(notes)
    return (*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more such lines")
