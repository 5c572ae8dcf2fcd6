"""What is done to a store, in order: first what only reads, then what changes little, at the end what changes all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaling.making import path_of, question


@dataclass(frozen=True, slots=True)
class Place:
    """One store, and what belongs to it.

    Attributes
    ----------
    size : bytes of the store's folder.
    """

    store: Path
    files: Path
    count: int
    size: int

    def file(self, number: int) -> str:
        return str(path_of(self.files, number))


@dataclass(frozen=True, slots=True)
class Operation:
    """One command.

    Attributes
    ----------
    words : the command's, without the store.
    before : what is done first, and not measured.
    until : what a service says when it is up.
    """

    name: str
    words: Callable[[Place], list[str]]
    before: Callable[[Place], None] = lambda place: None
    until: str | None = None


def _change(place: Place) -> None:
    """Write another paragraph to one file."""
    path = path_of(place.files, 1)
    path.write_text(path.read_text(encoding="utf-8") + f"\n{question(path.stat().st_size)}.\n", encoding="utf-8")


def _ingest(*words: str) -> Callable[[Place], list[str]]:
    return lambda place: ["ingest", str(place.files), "--offline", "--device", "cpu", *words]


_ASK = ("--offline", "--device", "cpu")
OPERATIONS = (
    Operation("store stats", lambda place: ["store", "stats"]),
    Operation("inspect", lambda place: ["inspect"]),
    Operation("inspect plan", lambda place: ["inspect", "plan", question(1), *_ASK]),
    Operation("query", lambda place: ["query", question(2), "--max-tokens", "1", *_ASK]),
    Operation(
        "query --documents",
        lambda place: ["query", question(3), "--max-tokens", "1", *_ASK, "--documents", place.file(3)],
    ),
    Operation(
        "query --set search.source",
        lambda place: ["query", question(3), "--max-tokens", "1", *_ASK, "--set", "search.source=*00001.txt"],
    ),
    Operation("serve, until it listens", lambda place: ["serve", "--port", "0", "--no-key", *_ASK], until="ready on"),
    Operation("doctor", lambda place: ["doctor", "--offline"]),
    Operation("store ls", lambda place: ["store", "ls"]),
    Operation("store verify --sample 1/100", lambda place: ["store", "verify", "--sample", "1/100"]),
    Operation(
        "store prune --dry-run", lambda place: ["store", "prune", "--dry-run", "--max-size", str(place.size * 9 // 10)]
    ),
    Operation("store rm --dry-run", lambda place: ["store", "rm", "--dry-run", place.file(5)]),
    Operation(
        "store export, one document",
        lambda place: ["store", "export", str(place.store.parent / "one.kvpack"), "--only", place.file(6), "--force"],
    ),
    Operation("ingest, nothing changed", _ingest()),
    Operation("ingest, one file changed", _ingest(), _change),
    Operation("ingest --sync --dry-run", _ingest("--sync", "--dry-run")),
    Operation(
        "ingest of one named file", lambda place: ["ingest", place.file(1), "--offline", "--device", "cpu"], _change
    ),
    Operation("watch, until it watches", lambda place: ["watch", str(place.files), *_ASK], until="watching "),
    Operation("store pin, one document", lambda place: ["store", "pin", place.file(7)]),
    Operation("store pin --remove", lambda place: ["store", "pin", "--remove", place.file(7)]),
    Operation(
        "compress, one chunk", lambda place: ["compress", "--level", "lossless", "--chunks", _chunk(place, 8), *_ASK]
    ),
    Operation("store rm, one document", lambda place: ["store", "rm", place.file(9)]),
    Operation(
        "store prune to 90 %", lambda place: ["store", "prune", "--yes", "--max-size", str(place.size * 9 // 10)]
    ),
    Operation("store compact", lambda place: ["store", "compact"]),
    Operation("store verify", lambda place: ["store", "verify"]),
)


def _chunk(place: Place, number: int) -> str:
    """The id of the first chunk of a file."""
    from kvtool.core.cache.store import Store

    with Store.open(place.store) as store:
        document = store.document(place.file(number))
        assert document is not None
        return document.chunks[0].chunk_id.hex()
