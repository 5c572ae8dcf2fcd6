"""Usage scores of a store's chunks, read from a journal of what was asked for.

A journal is a store's own notes (its folder), or a file of JSON lines, whose kinds may be mixed: answers (`query
--json`, `query --batch`) and the log of `kvtool serve`, which name the chunks that were read; and questions (`query
--batch`, `eval`, an audit's journal), whose chunks are retrieved now. Other lines are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.warmth import joined
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import request_of
from kvtool.core.retrieval.finder import Finder

_CHUNK = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")
_TIMES = ("time", "at")  # seconds since 1970, by what wrote the line


@dataclass(slots=True)
class Asked:
    """Contents of a journal.

    Attributes
    ----------
    warmth : chunk id → its usage score by the journal (`cache/warmth.py`).
    lines : number of usable lines; passed : of others, such as a torn line or a question that finds nothing.
    """

    warmth: dict[bytes, float] = field(default_factory=dict)
    lines: int = 0
    passed: int = 0


def read_asked(journal: Path, store: Store, finder: Finder, options: QueryOptions, now: float) -> Asked:
    """Read a journal; chunks that the store does not know are left out.

    Parameters
    ----------
    now : seconds since 1970: when lines that say no time, or a later one, count as asked.

    Raises
    ------
    UsageError : it cannot be read, or nothing in it is of use.
    """
    if journal.is_dir():
        with Store.open(journal) as other:
            warmth = {chunk_id: warm for chunk_id, warm in other.warmth().items() if store.has_chunk(chunk_id)}
        return Asked(warmth, lines=len(warmth))
    asked, found = Asked(), dict[str, list[bytes]]()
    for row in _rows(journal):
        chunks = _named(row)
        if not chunks and isinstance(row.get("question"), str):
            key = json.dumps([row.get(name) for name in ("question", "chunks", "documents")])
            if key not in found:
                found[key] = _found(finder, row, options)
            chunks = found[key]
        chunks = [chunk_id for chunk_id in chunks if store.has_chunk(chunk_id)]
        asked.lines, asked.passed = asked.lines + bool(chunks), asked.passed + (not chunks)
        for chunk_id in chunks:
            asked.warmth[chunk_id] = joined(asked.warmth.get(chunk_id, 0.0), _when(row, now))
    if not asked.warmth:
        raise UsageError(
            f"{str(journal)!r} asks for nothing that the store has",
            'one JSON object a line: {"question"}, an answer of `kvtool query --json`, a line of --request-log',
        )
    return asked


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a file; a line that is none is an empty one."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for line in file:
                if line.strip():
                    yield _row(line)
    except OSError as error:
        raise UsageError(
            f"the journal {str(path)!r} cannot be read: {error.strerror}", "name a JSON-lines file, or a store's folder"
        ) from error


def _row(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _named(row: Mapping[str, Any]) -> list[bytes]:
    """The chunks that a line names by their whole ids, each once."""
    named = row.get("chunks")
    ids = [one.get("id") if isinstance(one, dict) else one for one in (named if isinstance(named, list) else ())]
    whole = [one for one in ids if isinstance(one, str) and _CHUNK.fullmatch(one)]
    return [bytes.fromhex(one) for one in dict.fromkeys(whole)]


def _found(finder: Finder, row: Mapping[str, Any], options: QueryOptions) -> list[bytes]:
    """The chunks that a question is answered from; none where it finds nothing, or is no request."""
    try:
        hits = options.find(finder, request_of(row)).hits
    except (KvtoolError, ValueError):
        return []
    return [*dict.fromkeys(hit.passage.chunk_id for hit in hits)]


def _when(row: Mapping[str, Any], now: float) -> float:
    times = [row[name] for name in _TIMES if isinstance(row.get(name), (int, float))]
    return times[0] if times and 0 < times[0] < now else now
