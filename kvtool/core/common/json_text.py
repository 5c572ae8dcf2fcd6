"""Text for people and programs: JSON that is safe on a terminal, equal spellings in Unicode, globs, sizes and times."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

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
