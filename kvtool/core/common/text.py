"""Text for people and programs: JSON that is safe on a terminal, equal spellings in Unicode, globs, sizes and times."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Mapping
from fnmatch import translate
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kvtool.core.errors import UsageError

UNSEEN = (
    # soft hyphen, marks of direction, Syriac and Mongolian marks, zero-width space
    "\xad\u061c\u070f\u180e\u200b\u200e\u200f"
    # separators of lines and paragraphs, overrides of direction, word joiner, invisible operators, isolates
    "\u2028-\u202e\u2060-\u206f"
    # byte order mark, annotations
    "\ufeff\ufff0-\ufffb"
    # layout of hieroglyphs, of shorthand and of music
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    # tags, and what Unicode reserves next to them; not the selectors of variants
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
"""Characters without a shape, for a regular expression: Unicode's format characters (Cf) but for the two joiners, which
scripts and emoji are written with, and for the signs of Arabic and Kaithi numbers, which are drawn."""

# What a person does not see and a terminal obeys, and what no encoding takes: DEL and C1 (C0 is escaped by any JSON),
# and lone surrogates.
_STEERING = re.compile(f"[\x7f-\x9f{UNSEEN}\ud800-\udfff]")


def escaped(text: str) -> str:
    return _STEERING.sub(lambda match: json.dumps(match[0])[1:-1], text)


def parsed(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError also for JSON that is nested too deep for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def level_rows(levels: Mapping[str, int | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return values by level as rows `{level, bytes}` or `{level, ...}`: the one shape of `levels` in any object."""
    return [{"level": level} | ({"bytes": of} if isinstance(of, int) else dict(of)) for level, of in levels.items()]


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


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


def size_in_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in _SIZES:
        raise UsageError(f"{text!r} is not a size", "such as 500MB or 20GB")
    return int(float(match[1]) * _SIZES[match[2]])


def shown_size(amount: int) -> str:
    """Format bytes for people, in a unit that suits them: `0.8 kB`, `5.2 MB`, `20.0 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if amount >= 0.95 * scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount / 1e3:,.1f} kB"


def counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def seconds(text: str) -> float:
    """Read a length of time: `10m`, `1.5h`, `30s`, or a number of seconds. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w|y)\s*", text, re.IGNORECASE | re.ASCII)
    return float(match[1]) * _TIMES[match[2].lower()] if match else float(text.strip())
