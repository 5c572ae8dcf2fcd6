"""Side files next to the records: tables of the retrieval index, small JSON, and logs of use, each with digests.

A table ends in 24 bytes: ``kvtool`` with two bytes of format, and xxh3-128 over all before the digest. It is checked
when a process maps it for the first time: after that it is mapped memory like the rest. A JSON object has its digest in
a field.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from kvtool.core.cache import layout
from kvtool.core.cache.layout import atomic_write
from kvtool.core.errors import DamagedError

TABLES = ".tables"  # how the names of sealed tables end
TAIL_BYTES = 24
_MAGIC = b"kvtool\0\1"
_DIGEST = "digest"
_AT_ONCE = 2**24
_FOLDERS = ("index", "gate", "speeds", "seen")

_sound: set[tuple[int, ...]] = set()  # files that this process has checked, as they are


def tail_of(data: bytes) -> bytes:
    return _MAGIC + xxhash.xxh3_128_digest(data + _MAGIC)


def check_table(path: Path, view: memoryview, status: os.stat_result) -> memoryview:
    """Return the bytes of a mapped table without its tail; hashed once in this process. Raises DamagedError."""
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if stamp not in _sound:
        if not _is_sealed(view):
            raise DamagedError(f"{path} does not match its digest", "run `kvtool store verify --repair`")
        _sound.add(stamp)
    return view[:-TAIL_BYTES]


def _is_sealed(view: memoryview) -> bool:
    digest = xxhash.xxh3_128()
    covered = view[: len(_MAGIC) - TAIL_BYTES]
    for at in range(0, len(covered), _AT_ONCE):
        digest.update(covered[at : at + _AT_ONCE])
    return len(view) >= TAIL_BYTES and view[-TAIL_BYTES:] == _MAGIC + digest.digest()


def write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write(path, json.dumps({_DIGEST: json_digest(value), **value}, indent=1).encode())


def read_json(path: Path, **marks: Any) -> dict[str, Any]:
    """Read what :func:`write_json` wrote; empty if it cannot be read, or if a field lacks the value in `marks`."""
    try:
        value = _read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if all(value.get(field) == mark for field, mark in marks.items()) else {}


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object")
    if value.pop(_DIGEST, None) != json_digest(value):
        raise ValueError(f"{path} does not match its digest")
    return value


def json_digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def damaged_files(root: Path) -> Iterator[tuple[str, str]]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # replaced while we look
                if (why := _file_damage(path)) is not None:
                    yield path.relative_to(root).as_posix(), why


def _file_damage(path: Path) -> str | None:
    try:
        if path.name.endswith(TABLES):
            return None if _is_sealed(memoryview(path.read_bytes())) else "does not match its digest"
        if path.suffix == ".json":
            _read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read: {error}"
    return None


T = TypeVar("T", bound=float)

_MAX_LOG_BYTES = 64 * 2**20  # then readers stop noting until a writer folds it
_LONG_LOG_BYTES = 2**20
_MAX_BUFFER = 4096
HALF_LIFE = 3 * 86_400.0  # seconds; 30 to 3,000 questions beat recency only (samples/results/streaming.md)
_USE = re.compile(rb"([0-9a-f]{40}) ([0-9]{1,12})")
_COUNTS = re.compile(rb"([0-9]{1,12}) ([0-9]{1,12}) ([0-9]{1,12})")


def append(path: Path, bodies: Iterable[str]) -> None:
    """Append lines in one write, unless the log is long enough. Raises nothing: a note is worth less than an answer."""
    data = b"".join(_line(body.encode()) for body in bodies)
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            os.fchmod(handle, 0o600)
            if os.fstat(handle).st_size + len(data) <= _MAX_LOG_BYTES:
                os.write(handle, data)
        finally:
            os.close(handle)


def _line(body: bytes) -> bytes:
    return body + f" {zlib.crc32(body):08x}\n".encode()


def _sound_lines(path: Path, form: re.Pattern[bytes]) -> Iterator[tuple[bytes, ...]]:
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):  # reading a FIFO would hang
            lines = path.read_bytes().splitlines()
    for line in lines:
        match = form.fullmatch(body := line[:-9])
        if match and line + b"\n" == _line(body):
            yield match.groups()


class Served(NamedTuple):
    questions: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def hit_rate(self) -> float | None:
        requests = self.hits + self.misses
        return self.hits / requests if requests else None


class UseLog:
    """The notes of one reader, which writes them many at a time; none if it is not `enabled`. Each is one line that
    ends in a checksum, appended in one ``O_APPEND`` write, so that lines of several processes do not mix."""

    def __init__(self, root: Path, enabled: bool) -> None:
        self._root = root
        self._enabled = enabled
        self._uses: list[tuple[bytes, int]] = []
        self._served = Served()
        self._mutex = threading.Lock()

    @property
    def is_long(self) -> bool:
        """True if a writer should fold the log now: readers stop noting when it is full."""
        try:
            return (self._root / layout.ACCESS_FILE).stat().st_size > _LONG_LOG_BYTES
        except OSError:
            return False

    def note_uses(self, chunk_ids: Iterable[bytes]) -> None:
        """Note the use of chunks now, stored or computed for a question."""
        if not self._enabled:
            return
        now = int(time.time())
        with self._mutex:
            self._uses += ((bytes(chunk_id), now) for chunk_id in chunk_ids)
            full = len(self._uses) >= _MAX_BUFFER
        if full:
            self.flush()

    def note_question(self, hits: int, misses: int) -> None:
        if self._enabled:
            with self._mutex:
                questions, *counts = self._served
                self._served = Served(questions + 1, counts[0] + hits, counts[1] + misses)

    def flush(self) -> None:
        with self._mutex:
            uses, self._uses = self._uses, []
            served, self._served = self._served, Served()
        if uses:
            append(self._root / layout.ACCESS_FILE, (f"{chunk_id.hex()} {when}" for chunk_id, when in uses))
        if served.questions:
            append(self._root / layout.SERVED_FILE, [" ".join(map(str, served))])


def read_log(root: Path) -> list[tuple[bytes, int]]:
    """Read the uses that no writer has folded yet: chunk id and seconds since 1970. Notes move from the log to the log
    set aside, and from there into the store: reading in this order misses none."""
    return [*_uses(root / layout.ACCESS_FILE), *_uses(_aside(root))]


def take_log(root: Path) -> tuple[list[tuple[bytes, int]], Path]:
    """Set the log aside and read it; unlink the returned path once the uses are committed."""
    aside = _aside(root)
    if not aside.exists():
        with contextlib.suppress(FileNotFoundError):
            (root / layout.ACCESS_FILE).rename(aside)
    return [*_uses(aside)], aside


def _aside(root: Path) -> Path:
    return root / f"{layout.ACCESS_FILE}.folding"


def _uses(path: Path) -> Iterator[tuple[bytes, int]]:
    return ((bytes.fromhex(chunk.decode()), int(when)) for chunk, when in _sound_lines(path, _USE))


def fold_uses(uses: Iterable[tuple[bytes, T]], combine: Callable[[T, T], T]) -> dict[bytes, T]:
    """Map each chunk id to its times or scores: the last use by `max`, the LRFU score by `combine_scores`."""
    folded: dict[bytes, T] = {}
    for chunk_id, when in uses:
        folded[chunk_id] = combine(folded[chunk_id], when) if chunk_id in folded else when
    return folded


def read_served(root: Path) -> Served:
    rows = list(_sound_lines(root / layout.SERVED_FILE, _COUNTS))
    return Served(*(sum(int(row[at]) for row in rows) for at in range(3)))


def combine_scores(score: float, other: float) -> float:
    """Combine two LRFU scores (Lee et al., IEEE Transactions on Computers 50(12), 2001, section 3), or times of use, in
    seconds since 1970; 0: never used.

    Every use of a chunk counts for half as much after `HALF_LIFE`. The score is the time at which a single use would
    count for as much as all uses together. It does not change as time passes: scores of any age are compared without a
    clock.
    """
    low, high = sorted((score, other))
    return high + HALF_LIFE * math.log2(1 + 2 ** ((low - high) / HALF_LIFE)) if low > 0 else high
