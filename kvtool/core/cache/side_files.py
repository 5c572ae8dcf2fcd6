"""Side files next to the records: tables of the retrieval index, small JSON, and logs of use, each with digests.

A table ends in 24 bytes: ``kvtool`` with two bytes of format, and xxh3-128 over all before the digest. It is checked
when a process maps it for the first time: after that it is mapped memory like the rest. A JSON object has its digest in
a field.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

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
