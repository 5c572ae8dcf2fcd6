"""SHA-256 of files, remembered between runs. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from kvtool.core.errors import KvtoolError
from kvtool.core.places import cache_dir

_REMEMBERED = 4096  # entries kept, the newest
_RACY_SECONDS = 2.0  # a file younger than this may change again under the same mtime
_LOCK_SECONDS = 5.0


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes; hashed once for every (path, size, mtime_ns)."""
    real = path.resolve()
    stat = real.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    known = _remembered().get(str(real))
    if known is not None and known[:2] == stamp:
        return str(known[2])
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    after = real.stat()
    unchanged = [after.st_size, after.st_mtime_ns] == stamp
    if unchanged and time.time() - stat.st_mtime > _RACY_SECONDS:
        _remember(str(real), [*stamp, digest])
    return digest


def _table() -> Path:
    return cache_dir() / "digests.json"


def _remembered() -> dict[str, list[int | str]]:
    """The table on disk; anything unreadable counts as empty, for it can be computed again."""
    try:
        table = json.loads(_table().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, KvtoolError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {k: v for k, v in table.items() if isinstance(v, list) and len(v) == 3}


def _remember(path: str, entry: list[int | str]) -> None:
    """Add one entry. A cache that cannot be written (no home, read-only, lock held) costs time, nothing else."""
    with contextlib.suppress(OSError, Timeout, KvtoolError), _locked():
        table = _remembered()
        table.pop(path, None)
        table[path] = entry
        newest = dict(list(table.items())[-_REMEMBERED:])
        write_atomically(_table(), json.dumps(newest).encode())


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    _table().parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{_table()}.lock", timeout=_LOCK_SECONDS):
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old bytes or the new ones, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
