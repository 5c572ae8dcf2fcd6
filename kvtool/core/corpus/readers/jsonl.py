"""JSON lines: one document a line; a broken line is noted and the others are read. Jupyter notebooks: the text and the
code of each cell, what it printed, and how it failed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.document import (
    EMBEDDED,
    Document,
    UnreadableFile,
    numbered,
    shortened,
    unread_note,
    without_data_uris,
)
from kvtool.core.corpus.readers.encoding import of_text
from kvtool.core.corpus.readers.html import visible

_TEXT_KEYS = ("text", "content", "body", "passage")
_SPEAKERS = ("role", "speaker")
_ANSWERED = frozenset(  # keys that are read beside a text, whatever their values
    "q a question questions query prompt instruction input context answer answers response responses completion output "
    "summary abstract description headline caption choices explanation rationale truth comments replies".split()
)
_ROW = re.compile(r"\S")
_LAST_WORD = re.compile(r"[A-Z]?[a-z]+\Z|[A-Z]+\Z")  # of `best_answer` or `bestAnswer`
_END = re.compile(r"[.?!…؟।][\"'”’»)]*\s*\Z")
_LONGEST_REPEATED = 40  # characters of a value that is shown although the text has it, too
_ROLES = ("role", "from", "speaker")
_SAID = ("content", "value", "text")
_NAMES = ("id", "_id", "uuid", "type")
_MOST_NUMBERS = 20  # in a list; a longer one is no text
_LONGEST_LABEL = 1000  # characters; a longer id names nothing
_LONGEST_OUTPUT = 2000  # characters of what one cell printed
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")  # of a terminal
_REPR = re.compile(r"\s*<[^<>]*>\s*")  # stands for what a plain text cannot show


@of_text()
def read(source: str, text: str) -> list[Document]:
    texts: list[tuple[int, str, str]] = []  # line, id and text
    notes, embedded, unread = list[str](), 0, dict[str, None]()
    for number, line in _rows(text):
        try:
            value = json.loads(line)
            full, why = _text(value), "no text"
        except (ValueError, RecursionError):
            full, why = "", "not JSON"
        if not full.strip():
            notes.append(f"line {number} left out: {why}")
            continue
        unread |= dict.fromkeys(_unread(value))
        clean = _without_surrogates(full)
        texts.append((number, _label(value), clean))
        embedded += 0 if EMBEDDED in line else clean.count(EMBEDDED)
        notes += [] if clean == full else [f"line {number}: lone surrogates replaced by U+FFFD"]
    if not texts:
        raise UnreadableFile(f"no line has a text: {notes[0]}")
    counts = Counter(label for _, label, _ in texts)
    documents = []
    for number, label, clean in texts:
        if not label or counts[label] > 1:
            label = str(number)
            while counts[label] == 1:
                label = f"line {label}"
        documents.append(Document(f"{source}#{label}", clean, "text", (), (Mark(0, number),)))
    fields = (_without_surrogates(f"fields not read: {', '.join(shortened([*unread]))}"),) if unread else ()
    notes = [*shortened(notes), *unread_note({"embedded data": embedded}), *fields]
    return [replace(documents[0], notes=tuple(notes)), *documents[1:]]


def _rows(text: str) -> list[tuple[int, str]]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    with suppress(ValueError, RecursionError):
        json.loads(lines[0][1])
        return lines
    rows, end, number = list[tuple[int, str]](), 0, 1
    with suppress(ValueError, RecursionError):
        while found := _ROW.search(text, end):
            number += text.count("\n", end, start := found.start())
            end = json.JSONDecoder().raw_decode(text, start)[1]
            rows.append((number, text[start:end]))
            number += rows[-1][1].count("\n")
        return rows
    return lines


def _text_key(row: dict[str, Any]) -> str:
    return next((key for key in _TEXT_KEYS if isinstance(row.get(key), str) and row[key].strip()), "")


def _text(value: object) -> str:
    row = value if isinstance(value, dict) else {}
    name = _text_key(row)
    if not name:
        return _words(value) if isinstance(value, str) else "\n".join(_lines("", value)) if _has_words(value) else ""
    text, title = _without_data(row[name]), row.get("title")
    others = {key: each for key, each in row.items() if key not in (name, "title")}
    beside = "\n".join(_beside(others, row[name]))
    role = next((row[key] for key in _SPEAKERS if isinstance(row.get(key), str) and row[key].strip()), "")
    text = f"{role[0].upper()}{role[1:]}: {text}" if role else text
    return "\n\n".join(each for each in (title, text, beside) if isinstance(each, str) and each.strip())


def _unread(value: object) -> Iterator[str]:
    row = value if isinstance(value, dict) else {}
    name = _text_key(row)
    for key, each in row.items() if name else ():
        is_own = key in (name, "title", *_NAMES, *_SPEAKERS)
        if not is_own and _has_words(each) and not any(_beside({key: each}, "")):
            yield key[:_LONGEST_REPEATED]


def _beside(row: dict[str, object], text: str) -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, dict) and not _is_known(key):
            yield from _beside(value, text)
        elif _is_said(key, value, text):
            yield from _lines(key, value)


def _is_said(key: str, value: object, text: str) -> bool:
    if isinstance(value, dict):
        return any(_is_said(key if _is_known(key) else name, each, text) for name, each in value.items())
    if isinstance(value, list):
        return any(_is_said(key, each, text) for each in value)
    if not isinstance(value, str):
        return key.lower() == "answer" and value is not None
    is_known = _is_known(key)
    if not is_known and not _is_sentence(value):
        return False
    may_repeat = (not is_known or len(value) > _LONGEST_REPEATED) and 1000 * len(value) > len(text)  # linear
    return not (may_repeat and value.strip() in text)


def _is_known(key: str) -> bool:
    word = _LAST_WORD.search(key[-20:])
    return word is not None and word[0].lower() in _ANSWERED


def _is_sentence(text: str) -> bool:
    small = sum(word.isalpha() and word[0] == word[0].lower() for word in text.split())
    is_prose = small > 5 or (small > 1 and _END.search(text)) or re.search("[。！？]", text)
    return bool(is_prose) and not text.lstrip().startswith("<")


def _has_words(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_words(each) for key, each in value.items() if key not in _NAMES)
    if isinstance(value, list):
        return any(map(_has_words, value))
    return isinstance(value, str) and any(map(str.isalpha, value))


def _lines(key: str, value: object) -> Iterator[str]:
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
    if isinstance(value, list):
        is_vector = len(value) > _MOST_NUMBERS and all(isinstance(each, int | float) for each in value)
        return f"{len(value):,} numbers, left out" if is_vector else ", ".join(filter(None, map(_words, value)))
    if isinstance(value, str):
        return "picture, left out" if value.startswith("data:image/") else _without_data(value)
    return "" if value is None else json.dumps(value)


def _without_data(text: str) -> str:
    return without_data_uris(f'"{text}"', base64=True)[1:-1]  # quotes end base64


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _label(row: object) -> str:
    value = row.get("id") if isinstance(row, dict) else None
    label = _without_surrogates(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return label if len(label) <= _LONGEST_LABEL else ""


@of_text()
def read_notebook(source: str, text: str) -> list[Document]:
    try:
        notebook = json.loads(text)
        sheets = [notebook] if "cells" in notebook else notebook["worksheets"]  # before format 4
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        printed = [_printed(cell) for cell in cells]
        texts = ["\n\n".join(_texts(cell, output)) for cell, output in zip(cells, printed, strict=True)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UnreadableFile("damaged: no notebook in JSON") from error
    long = sum(len(output) > _LONGEST_OUTPUT for output in printed)
    return [numbered(source, "markdown", "cell", texts, unread_note({"ends of long outputs": long}))]


def _texts(cell: Any, printed: str) -> Iterator[str]:
    body = without_data_uris(_whole(cell.get("source", cell.get("input", ""))))
    if cell.get("cell_type") != "code":
        yield f"{'#' * min(6, int(cell.get('level', 1)))} {body}" if cell.get("cell_type") == "heading" else body
        return
    if body.strip():
        yield f"```\n{body}\n```"
    if printed.strip():
        yield printed[:_LONGEST_OUTPUT]


def _printed(cell: Any) -> str:
    """Join a cell's outputs, errors first: they are short, and outputs may be long."""
    parts: list[str] = []
    for out in sorted(cell.get("outputs", ()), key=lambda out: "ename" not in out):
        text = _COLOURS.sub("", _output(out))
        follows = parts and not parts[-1].endswith("\n") and out.get("output_type") != "stream"
        parts += ["\n" + text if follows else text] if text else []
    return without_data_uris("".join(parts))


def _output(out: Any) -> str:
    if "ename" in out:
        error = f"{out['ename']}: {out.get('evalue', '')}\n"
        trace = "\n".join(map(str, out.get("traceback", ())))
        return error + (f"{trace}\n" if "\n" in trace else "")
    data = out.get("data", out)
    forms = {key.rpartition("/")[2]: _whole(value) for key, value in data.items() if isinstance(value, (str, list))}
    plain = forms.get("plain") or forms.get("text", "")
    if plain and not _REPR.fullmatch(plain):
        return plain
    return forms.get("markdown") or visible(forms.get("html", "")) or forms.get("latex") or plain


def _whole(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(map(str, lines))
