"""A listing of documents or chunks, by conditions and in an order: kvtool/docs/listing.md has the grammar."""

from __future__ import annotations

import math
import operator
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

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
    """A document without its text: a list of a million chunks would hold all texts else.

    Attributes
    ----------
    origin : the pack, store or signer that it came from; "" for one that was ingested here.
    modified : when its file was changed last before it was ingested, in seconds since 1970; None: not known.
    """

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None

    @classmethod
    def of(cls, document: DocumentEntry, files: Mapping[str, tuple[str, int]]) -> Listed:
        """Return a document's entry in the listing; `files` as of :func:`files_of`."""
        origin, modified = files.get(document.source, ("", 0))
        return cls(document.source, document.kind, len(document.text), origin, modified or None)


def files_of(store: Store) -> dict[str, tuple[str, int]]:
    """Map documents to where their files came from, and when those were changed last. Raises DamagedError."""
    return {
        source: (entry.origin.name, entry.mtime_ns // 10**9) for entry in store.files() for source in entry.documents
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A document's chunk.

    Attributes
    ----------
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
    def start(self) -> int:
        """The character of its document at which it begins."""
        return self.ref.start

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.ref.tokens

    @property
    def bytes(self) -> int:
        """Return the bytes of all its records."""
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        """The chunk without its document."""
        return {
            "id": self.ref.chunk_id.hex(),
            "start": self.start,
            "end": self.ref.end,
            "tokens": self.tokens,
            "levels": level_rows(self.levels),
            "bytes": self.bytes,
            "last_used": self.last_used,
            "pinned": self.pinned,
        }


@dataclass(slots=True)
class DocumentRow:
    """A document with what those of its chunks come to that are listed; the fields are those of a `Row`.

    Attributes
    ----------
    last_used, age : of the chunk that was used last.
    pinned : all of it, or a chunk.
    """

    document: Listed
    start: int = 0
    chunks: int = 0
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None
    age: float = NEVER
    pinned: bool = False

    def add(self, row: Row) -> None:
        """Count a chunk of the document in."""
        self.chunks += 1
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        if row.age < self.age:
            self.age, self.last_used = row.age, row.last_used
        self.pinned = self.pinned or row.pinned

    @property
    def bytes(self) -> int:
        """Return the bytes of all records of these chunks."""
        return sum(self.levels.values())

    def to_json(self, chunks: Iterable[Row]) -> dict[str, Any]:
        """The document with these chunks."""
        own = {name: getattr(self.document, name) for name in ("source", "kind", "characters", "origin", "modified")}
        summed = {name: getattr(self, name) for name in ("tokens", "bytes", "last_used", "pinned")}
        return own | summed | {"chunks": [row.to_json() for row in chunks]}


Test = Callable[[Row], bool]
AnyRow = TypeVar("AnyRow", Row, DocumentRow)


def rows_of(store: Store) -> Iterator[Row]:
    """All chunks of all documents, in the documents' order. Raises DamagedError."""
    used, pins, now = store.last_used(), store.pins(), time.time()
    sources, chunks, files = set(pins["sources"]), set(pins["chunks"]), files_of(store)
    for document in store.documents():
        listed = Listed.of(document, files)
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
    "tokens": (_NUMERIC, _number(lambda row: row.tokens, int)),
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

_KEYS: dict[str, Callable[[Row | DocumentRow], Any]] = {
    "source": lambda row: (row.document.source, row.start),
    "kind": lambda row: row.document.kind,
    "tokens": lambda row: row.tokens,
    "chunks": lambda row: row.chunks,
    "used": lambda row: row.age,
    "level": lambda row: min(map([*LEVELS].index, known(row.levels)), default=len(LEVELS)),
    "bytes": lambda row: row.bytes,
    "pinned": lambda row: not row.pinned,
}


def parse_sort(text: str) -> Callable[[Iterable[AnyRow]], list[AnyRow]]:
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


def documents_of(rows: Iterable[Row]) -> list[DocumentRow]:
    """Documents in the order of their first row, with what their rows come to."""
    by_source: dict[str, DocumentRow] = {}
    for row in rows:
        by_source.setdefault(row.document.source, DocumentRow(row.document)).add(row)
    return list(by_source.values())


def without_chunks(store: Store) -> list[DocumentRow]:
    """Documents that gave no chunk, which no row is of. Raises DamagedError."""
    files = files_of(store)
    return [DocumentRow(Listed.of(document, files)) for document in store.documents() if not document.chunks]


def listed(documents: Iterable[DocumentRow], rows: Iterable[Row]) -> dict[str, Any]:
    """Give documents, each with its rows, as JSON; chunks that several have count once."""
    by_source: dict[str, list[Row]] = {}
    sizes = {}
    for row in rows:
        by_source.setdefault(row.document.source, []).append(row)
        sizes[row.ref.chunk_id] = row.bytes
    shown = [document.to_json(by_source.get(document.document.source, ())) for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}
