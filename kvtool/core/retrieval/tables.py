"""Named arrays in one file that is mapped, not read: what a question needs of an index is a small part of it."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from kvtool.core.cache.side_files import check_table, tail_of
from kvtool.core.cache.space import check_file
from kvtool.core.common.files import replace_file
from kvtool.core.common.json_text import parsed
from kvtool.core.errors import DamagedError

Array = np.ndarray[Any, np.dtype[Any]]
_HEAD = struct.Struct("<Q")
_KINDS = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True, slots=True)
class Tables:
    """Arrays by name, views of the mapped file that must not be written, and a few texts."""

    arrays: Mapping[str, Array]
    texts: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def positions_in(ascending: Array, keys: Array) -> Array:
    """Positions of keys in an ascending table, int64 `[keys]`; -1 for a missing one."""
    at = np.searchsorted(ascending, keys)
    known = at < len(ascending)
    known[known] = ascending[at[known]] == keys[known]
    return np.where(known, at, -1)


def write_tables(path: Path, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Write a file that appears whole or not at all: safetensors, followed by a digest. Raises OSError."""
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, dict(texts))
    check_file(path.parent, len(data))
    replace_file(path, data + tail_of(data))


def open_tables(path: Path) -> Tables:
    """Map a file of :func:`write_tables`; its digest is checked once a process. Raises OSError, DamagedError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size < _HEAD.size:
            raise DamagedError(f"{path} is cut off")
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    view = check_table(path, view, status)
    try:
        (length,) = _HEAD.unpack_from(view)
        head: dict[str, Any] = parsed(bytes(view[_HEAD.size : _HEAD.size + length]))
        texts = head.pop("__metadata__", {})
        data = view[_HEAD.size + length :]
        return Tables({name: _array(data, row) for name, row in head.items()}, texts)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def _array(data: memoryview, row: Mapping[str, Any]) -> Array:
    start, stop = row["data_offsets"]
    kind = np.dtype(_KINDS[row["dtype"]])
    if not 0 <= start <= stop <= len(data):
        raise ValueError("an array is outside the file")
    return np.frombuffer(data[start:stop], kind).reshape(row["shape"])
