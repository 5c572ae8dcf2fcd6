"""Names and patterns of names: equal spellings in Unicode, and globs."""

from __future__ import annotations

import os
import re
import unicodedata
from fnmatch import translate
from itertools import pairwise
from pathlib import Path
from typing import Literal

_MOST_MARKS = 30  # combining marks in a row, as the Stream-Safe Text Format has it (Unicode Standard Annex 15)
# Marks are no letters, but for two of Kana's narrow forms, which normalisation makes marks.
_MARKS = re.compile(rf"(?:[^\w\s]|[\uff9e\uff9f]){{{_MOST_MARKS + 1},}}")


def normalised(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Normalise a text, of which 가 and é are one character or several, in linear time: Python sorts the combining
    marks of a letter in quadratic time."""
    if text.isascii():
        return text
    cuts = [0, *(cut for run in _MARKS.finditer(text) for cut in _cuts(run)), len(text)]
    return "".join(unicodedata.normalize(form, text[start:stop]) for start, stop in pairwise(cuts))


def _cuts(run: re.Match[str]) -> list[int]:
    cuts, marks = [], 0
    for at, letter in enumerate(run[0], run.start()):
        marks = marks + 1 if unicodedata.combining(unicodedata.normalize("NFKD", letter)[0]) else 0
        if marks > _MOST_MARKS:
            cuts.append(at)
            marks = 1
    return cuts


def composed(name: str) -> str:
    return normalised("NFC", name)


def as_on_disk(given: Path) -> Path:
    """Spell a path as on the disk, if nothing is at it as it was typed: letters may be composed otherwise there."""
    try:
        if str(given).isascii() or os.path.lexists(given):
            return given
    except ValueError:  # no path at all: its reader reports that
        return given
    path = Path(given.anchor)
    for name in given.parts[1:] if given.anchor else given.parts:
        path /= name if os.path.lexists(path / name) else _spelled(path, name)
    return path if os.path.lexists(path) else given


def _spelled(folder: Path, name: str) -> str:
    spelling = composed(name)
    try:
        alike = [entry for entry in os.listdir(folder) if composed(entry) == spelling]
    except OSError:
        return name
    return alike[0] if len(alike) == 1 else name


def closed(glob: str) -> str:
    """Return an equal glob in which each bracket that none closes is a class: Python takes quadratic time."""
    at = 0
    while (start := glob.find("[", at)) >= 0:
        inner = start + 2 if glob.startswith("!", start + 1) else start + 1
        end = glob.find("]", inner + 1)  # a class may begin with the letter that else ends it
        if end < 0:
            return glob[:start] + glob[start:].replace("[", "[[]")
        at = end + 1
    return glob


def regex_of(glob: str) -> str:
    return translate(closed(glob))
