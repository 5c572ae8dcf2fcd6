"""A shared store in one SQLite file: `sqlite:///srv/kv.db`, for processes of one machine."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.errors import RemoteError, UsageError
from kvtool.core.remote.blobs import Backend, seconds_held

_TABLES = """
CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held (name TEXT PRIMARY KEY, until REAL NOT NULL);
"""


def from_url(url: str, timeout: float) -> SqliteBlobs:
    """The file of a URL; `timeout`: seconds to wait for another process that writes."""
    parts = urlsplit(url)
    if parts.netloc or len(parts.path) < 2:
        raise UsageError(f"{url} names no file of this machine", "such as sqlite:///srv/kv.db")
    return SqliteBlobs(unquote(parts.path), timeout)


class SqliteBlobs(Backend):
    """Values by name in a table; every change is a transaction of its own."""

    def __init__(self, path: str, timeout: float) -> None:
        self.url = f"sqlite://{path}"
        self._lock = threading.RLock()
        with self._explained():
            self._db = sqlite3.connect(path, timeout, isolation_level=None, check_same_thread=False)
            self._db.executescript(_TABLES)

    def sizes(self, names: Sequence[str]) -> list[int]:
        found = [self._one("SELECT length(value) FROM blobs WHERE name = ?", name) for name in names]
        return [row[0] if row else 0 for row in found]

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._changing():
            self._db.executemany("INSERT OR REPLACE INTO blobs VALUES (?, ?)", values.items())

    def flush(self) -> None:
        """Every transaction is durable when it ends."""

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        with self._changing():
            if self._value(name) != before:
                return False
            self._db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", (name, after))
            return True

    def names(self, below: str = "") -> Iterator[str]:
        with self._explained():
            rows = self._db.execute("SELECT name FROM blobs WHERE substr(name, 1, ?) = ?", (len(below), below))
            yield from [name for (name,) in rows]

    def delete(self, names: Sequence[str]) -> None:
        with self._changing():
            self._db.executemany("DELETE FROM blobs WHERE name = ?", [(name,) for name in names])

    def hold(self, name: str) -> None:
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO held VALUES (?, ?)", (name, time.time() + seconds_held(name)))

    def held(self) -> set[str]:
        with self._explained():
            return {name for (name,) in self._db.execute("SELECT name FROM held WHERE until > ?", (time.time(),))}

    def release(self, name: str) -> None:
        with self._changing():
            self._db.execute("DELETE FROM held WHERE name = ?", (name,))

    def close(self) -> None:
        self._db.close()

    def _read(self, wanted: BlobRequest) -> bytes | None:
        """A part of a pack, or a value; one that is larger than it may be is as good as none."""
        if wanted.pack:
            query = f"SELECT substr(value, {wanted.start + 1}, {wanted.most}) FROM blobs WHERE name = ?"
            row = self._one(query, wanted.pack)
            return bytes(row[0]) if row else None
        (size,) = self.sizes([wanted.name])
        return b"" if size > wanted.most else self._value(wanted.name)

    def _value(self, name: str) -> bytes | None:
        row = self._one("SELECT value FROM blobs WHERE name = ?", name)
        return bytes(row[0]) if row else None

    def _one(self, query: str, name: str) -> tuple | None:
        with self._explained():
            return self._db.execute(query, (name,)).fetchone()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock, self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RemoteError(f"{self.url} cannot be used: {error}", "is it a file that you may write?") from error
