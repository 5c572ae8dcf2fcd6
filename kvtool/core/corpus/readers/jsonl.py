"""JSON lines: one document a line; a broken line is noted and the others are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.encoding import of_text

_TEXT_KEYS = ("text", "content", "body", "passage")
_ROLES = ("role", "from", "speaker")
_SAID = ("content", "value", "text")
_NAMES = ("id", "_id", "uuid", "type")
_MOST_NUMBERS = 20  # in a list; a longer one is no text
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
        raise UnreadableFile(f"no line holds a text: {broken[0]}")
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
    row = value if isinstance(value, dict) else {}
    text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str) and row[key].strip()), None)
    title = row.get("title")
    if text is None:
        full = value if isinstance(value, str) else "\n".join(_lines("", value)) if _has_words(value) else ""
    else:
        full = f"{title}\n\n{text}" if isinstance(title, str) and title.strip() else text
    if not full.strip():
        raise _BrokenRowError("no text")
    clean = _without_surrogates(full)
    notes = () if clean == full else ("lone surrogates replaced by U+FFFD",)
    return _Row(number, _label(row.get("id")), clean, notes)


def _has_words(value: object) -> bool:
    """Return True if a string in a value, other than an id, has a letter."""
    if isinstance(value, dict):
        return any(_has_words(each) for key, each in value.items() if key not in _NAMES)
    if isinstance(value, list):
        return any(map(_has_words, value))
    return isinstance(value, str) and any(map(str.isalpha, value))


def _lines(key: str, value: object) -> Iterator[str]:
    """Yield `Key: value` for each value of a row; what is said in a conversation has the role as its key."""
    if isinstance(value, dict):
        role = next((name for name in _ROLES if isinstance(value.get(name), str)), "")
        said = next((name for name in _SAID if name in value), "")
        if said and (role or key):
            yield from _lines(value[role] if role else key, value[said])
            value = {name: each for name, each in value.items() if name not in (role, said, "type")}
        for name, each in value.items():
            yield from _lines(name, each)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for each in value:
            yield from _lines(key, each)
    elif words := _words(value):
        yield f"{key[:1].upper()}{key[1:]}: {words}" if key else words


def _words(value: object) -> str:
    """Return a string, a number, or a list of them as a text; vectors and pictures are only named."""
    if isinstance(value, list):
        is_vector = len(value) > _MOST_NUMBERS and all(isinstance(each, int | float) for each in value)
        return f"{len(value):,} numbers, left out" if is_vector else ", ".join(filter(None, map(_words, value)))
    if isinstance(value, str):
        return "picture, left out" if value.startswith("data:image/") else value
    return "" if value is None else json.dumps(value)


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
