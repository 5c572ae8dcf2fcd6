"""What a store holds, chunk by chunk, by conditions and in an order. kvtool/docs/listing.md has the grammar."""

from __future__ import annotations

import math
import operator
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import LEVELS, NAMES, known
from kvtool.core.common.durations import seconds
from kvtool.core.common.json_text import level_rows
from kvtool.core.common.sizes import size_in_bytes
from kvtool.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkRef, DocumentEntry
    from kvtool.core.cache.store import Store

NEVER = math.inf  # age of what was never used
_HINT = 'such as --filter "tokens>200 used<30d level=2 source~*.md"'
_TERM = re.compile(r"([a-z]*)\s*(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed:
    """A document without its text: a list of a million chunks would hold all texts else."""

    source: str
    kind: str
    characters: int
    origin: str

    @classmethod
    def of(cls, document: DocumentEntry, origins: Mapping[str, str]) -> Listed:
        """What is told of a document; `origins` as of :func:`origins_of`."""
        return cls(document.source, document.kind, len(document.text), origins.get(document.source, ""))


def origins_of(store: Store) -> dict[str, str]:
    """Map documents that were not ingested here to the pack, store or signer they came from. Raises DamagedError."""
    return {source: entry.origin.name for entry in store.files() if entry.origin.name for source in entry.documents}


@dataclass(frozen=True, slots=True)
class Row:
    """A document's chunk.

    Attributes
    ----------
    number : of the document in the store's order.
    chunks : that its document has.
    levels : bytes by level that is stored whole.
    last_used : seconds since 1970; None: never.
    age : seconds since then; NEVER.
    """

    document: Listed
    ref: ChunkRef
    chunks: int
    levels: dict[str, int]
    last_used: int | None
    age: float
    pinned: bool

    @property
    def bytes(self) -> int:
        """How many bytes all its records have."""
        return sum(self.levels.values())


Test = Callable[[Row], bool]


def rows_of(store: Store) -> Iterator[Row]:
    """All chunks of all documents, in the documents' order. Raises DamagedError."""
    used, pins, now = store.last_used(), store.pins(), time.time()
    sources, chunks, origins = set(pins["sources"]), set(pins["chunks"]), origins_of(store)
    for document in store.documents():
        listed = Listed.of(document, origins)
        for ref in document.chunks:
            last = used.get(ref.chunk_id)
            age = NEVER if last is None else max(0.0, now - last)
            pinned = document.source in sources or ref.chunk_id.hex() in chunks
            sizes = store.level_sizes(ref.chunk_id)
            yield Row(listed, ref, len(document.chunks), sizes, last, age, pinned)


# ---- conditions --------------------------------------------------------------------------------------------------


def parse_filter(text: str) -> Test:
    """Conditions with blanks between them, all of which a chunk has to meet: `FIELD OPERATOR VALUE`, without blanks.

    Raises
    ------
    UsageError : no such field, an operator that it does not have, or no such value.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--filter: {text!r} has a quotation mark that nothing closes", _HINT) from error
    tests = [_condition(word) for word in words]
    return lambda row: all(test(row) for test in tests)


def _condition(word: str) -> Test:
    match = _TERM.fullmatch(word)
    if not match:
        raise UsageError(f"--filter: {word!r} is no condition", _HINT)
    field, sign, value = match.groups()
    if field not in _FIELDS:
        fields = ", ".join(_FIELDS)
        raise UsageError(f"--filter: there is no field {field!r}", did_you_mean(field, _FIELDS) or f"known: {fields}")
    allowed, make = _FIELDS[field]
    if sign not in allowed.split():
        raise UsageError(f"--filter: {field} knows no {sign!r}", f"it knows {allowed}")
    try:
        return make(sign, value)
    except (ValueError, UsageError) as error:
        raise UsageError(f"--filter: {word!r}: {value!r} is no value of {field}", _VALUES[field]) from error


def _text(read: Callable[[Row], str]) -> Callable[[str, str], Test]:
    def make(sign: str, value: str) -> Test:
        if sign == "~":
            return lambda row: any(fnmatchcase(read(row), form) for form in (value, f"*/{value}"))
        return lambda row: _ORDER[sign](read(row), value)

    return make


def _number(read: Callable[[Row], float], parse: Callable[[str], float]) -> Callable[[str, str], Test]:
    def make(sign: str, value: str) -> Test:
        wanted = parse(value)
        return lambda row: _ORDER[sign](read(row), wanted)

    return make


def _level(sign: str, value: str) -> Test:
    if value not in (*LEVELS, "none"):
        raise ValueError(value)
    is_stored: Test = lambda row: value in row.levels if value != "none" else not row.levels  # noqa: E731
    return is_stored if sign == "=" else lambda row: not is_stored(row)


def _age(text: str) -> float:
    age = NEVER if text == "never" else seconds(text)
    if not age >= 0:  # nan, too
        raise ValueError(text)
    return age


def _yes_or_no(sign: str, value: str) -> Test:
    wanted = {"yes": True, "no": False}.get(value)
    if wanted is None:
        raise ValueError(value)
    return lambda row: _ORDER[sign](row.pinned, wanted)


_NUMERIC = "= != < <= > >="
_FIELDS: dict[str, tuple[str, Callable[[str, str], Test]]] = {
    "source": ("= != ~", _text(lambda row: row.document.source)),
    "kind": ("= != ~", _text(lambda row: row.document.kind)),
    "tokens": (_NUMERIC, _number(lambda row: row.ref.tokens, int)),
    "chunks": (_NUMERIC, _number(lambda row: row.chunks, int)),
    "used": (_NUMERIC, _number(lambda row: row.age, _age)),
    "level": ("= !=", _level),
    "bytes": (_NUMERIC, _number(lambda row: row.bytes, size_in_bytes)),
    "pinned": ("= !=", _yes_or_no),
}
_VALUES = {
    "source": "a path, or a glob behind ~",
    "kind": "a kind of document, or a glob behind ~",
    "tokens": "a whole number",
    "chunks": "a whole number: how many its document has",
    "used": "how long ago at most (<) or at least (>): 30d, 12h, 10m, or never",
    "level": f"one of {NAMES.replace('|', ', ')}, or none",
    "bytes": "a size such as 500kB or 2MB",
    "pinned": "yes or no",
}

# ---- order -------------------------------------------------------------------------------------------------------

_KEYS: dict[str, Callable[[Row], Any]] = {
    "source": lambda row: (row.document.source, row.ref.start),
    "kind": lambda row: row.document.kind,
    "tokens": lambda row: row.ref.tokens,
    "chunks": lambda row: row.chunks,
    "used": lambda row: row.age,
    "level": lambda row: min(map([*LEVELS].index, known(row.levels)), default=len(LEVELS)),
    "bytes": lambda row: row.bytes,
    "pinned": lambda row: not row.pinned,
}


def parse_sort(text: str) -> Callable[[Iterable[Row]], list[Row]]:
    """A field, ascending, or with a minus before it descending: `used`: latest first; `level`: finest first.

    Raises
    ------
    UsageError : there is no such field.
    """
    field = text.removeprefix("-")
    if field not in _KEYS:
        hint = did_you_mean(field, _KEYS) or f"known: {', '.join(_KEYS)}, each with a minus before it for the reverse"
        raise UsageError(f"--sort: there is no field {field!r}", hint)
    return lambda rows: sorted(rows, key=_KEYS[field], reverse=text.startswith("-"))


# ---- what is told ------------------------------------------------------------------------------------------------


def as_documents(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """JSON values: documents in the order of their first row, each with its rows."""
    by_source: dict[str, dict[str, Any]] = {}
    for row in rows:
        facts = by_source.setdefault(row.document.source, about(row.document))
        facts["chunks"].append(
            {
                "id": row.ref.chunk_id.hex(),
                "start": row.ref.start,
                "end": row.ref.end,
                "tokens": row.ref.tokens,
                "levels": level_rows(row.levels),
                "bytes": row.bytes,
                "last_used": row.last_used,
                "pinned": row.pinned,
            }
        )
    return list(by_source.values())


def about(document: Listed) -> dict[str, Any]:
    """A document's own facts, without any chunk."""
    names = ("source", "kind", "characters", "origin")
    return {name: getattr(document, name) for name in names} | {"chunks": []}
