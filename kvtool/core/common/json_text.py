"""JSON as every command gives it: safe on a terminal, and one shape for one thing (kvtool/docs/json.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# What a person does not see and a terminal obeys, and what no encoding takes: DEL and C1 (C0 is escaped by any JSON),
# marks of direction, line and paragraph separators, the byte order mark, lone surrogates.
_STEERING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""JSON text in which every such character stands as ``\uXXXX``, which any parser reads as itself."""
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parsed(text: str | bytes) -> Any:
    """Parse JSON that somebody else may have written.

    Raises
    ------
    ValueError : it is none, or nested deeper than the parser goes.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def level_rows(levels: Mapping[str, int | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is known by level, as rows `{level, bytes}` or `{level, ...}`: the one shape of `levels` in any object."""
    return [{"level": level} | ({"bytes": of} if isinstance(of, int) else dict(of)) for level, of in levels.items()]
