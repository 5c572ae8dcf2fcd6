"""SHA-256 of files, remembered between runs. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvtool.core.common.places import cache_dir
from kvtool.core.common.private import make_folder
from kvtool.core.errors import KvtoolError
from kvtool.core.model.files import HASH, Once, unnoticed

_REMEMBERED = 4096  # entries kept, the newest
_RACY_SECONDS = 2.0  # a file younger than this may change again under the same times
_LOCK_SECONDS = 5.0
_DAY_SECONDS = 86400.0
_TAKES_SECONDS = 1 << 28  # bytes of a file from which on its digest does
_BLOCKS, _BLOCK = 32, 1 << 15  # 1 MiB of a file, spread over it, first and last bytes included


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a file.

    Attributes
    ----------
    stamp : device, inode, size, mtime_ns, ctime_ns. Copies may keep size and mtime (`rsync -t`, `tar`); a restored disk
        image may keep all of it.
    digest : SHA-256 of all of it (hex).
    sample : SHA-256 of a part of it (hex).
    checked : seconds since 1970 when one of them was last computed.
    """

    stamp: tuple[int, ...]
    digest: str
    sample: str
    checked: float

    @property
    def is_fresh(self) -> bool:
        return 0 <= time.time() - self.checked < _DAY_SECONDS


def file_digest(path: Path, once: Once = unnoticed) -> str:
    """SHA-256 (hex) of a file's bytes, computed once for as long as the file stays the same; `once` is entered while
    that takes seconds.

    On the first use in a day a part of the file is read again and compared: a file with the same place and times need
    not be the same file.
    """
    real = path.resolve()
    stamp = _stamp(real)
    known = _remembered().get(str(real))
    if known is not None and known.stamp == stamp:
        if known.is_fresh:
            return known.digest
        if _sample(real) == known.sample:
            _remember(str(real), replace(known, checked=time.time()))
            return known.digest
    with once(HASH) if stamp[2] >= _TAKES_SECONDS else contextlib.nullcontext(), real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sample = _sample(real)
    if _stamp(real) == stamp and time.time() - max(stamp[-2:]) / 1e9 > _RACY_SECONDS:
        _remember(str(real), _Known(stamp, digest, sample, time.time()))
    return digest


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _sample(path: Path) -> str:
    """SHA-256 of blocks spread evenly over a file; of all of a small one."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        last = max(0, os.fstat(file.fileno()).st_size - _BLOCK)
        for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _table() -> Path:
    return cache_dir() / "digests.json"


def _remembered() -> dict[str, _Known]:
    """Read the table on disk; what cannot be read counts as empty, and so do entries from before there were samples."""
    try:
        table = json.loads(_table().read_text(encoding="utf-8"))
        return {path: known for path, entry in table.items() if (known := _parsed(entry))}
    except (OSError, ValueError, RecursionError, AttributeError, KvtoolError):
        return {}


def _parsed(entry: Any) -> _Known | None:
    try:
        return _Known(
            tuple(map(int, entry["stamp"])), str(entry["digest"]), str(entry["sample"]), float(entry["checked"])
        )
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def _remember(path: str, entry: _Known) -> None:
    """Add one entry to the table; one that cannot be written (no home, read-only, lock held) only costs time."""
    with contextlib.suppress(OSError, Timeout, KvtoolError), _locked():
        table = _remembered()
        table.pop(path, None)
        table[path] = entry
        newest = {path: asdict(known) for path, known in list(table.items())[-_REMEMBERED:]}
        write_atomically(_table(), json.dumps(newest).encode())


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    make_folder(_table().parent)
    with FileLock(f"{_table()}.lock", timeout=_LOCK_SECONDS, mode=0o600):
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
