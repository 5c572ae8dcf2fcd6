"""Opening LMDB itself: its flags, its readers' slots, the size of its map."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from kvtool.core.cache import layout
from kvtool.core.errors import KvtoolError, StoreFormatError

MAX_READERS = 1024  # killed readers keep their slots until the next reader_check
LOCK_FILE_BYTES = 128 * MAX_READERS
_MAP_START, _MAP_LIMIT, _MAP_LEAST = 2**40, 2**44, 2**24  # sparse: a 1 TiB map opens in 38 µs


def map_limit() -> int:
    """Bytes that the map may grow to (``KVTOOL_MAP_LIMIT``)."""
    return _bytes_from_environment("KVTOOL_MAP_LIMIT", _MAP_LIMIT)


def _bytes_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return max(int(text), 2**16) if text.isdecimal() else default


def open_lmdb(generation: Path, *, read_only: bool, create: bool = False) -> lmdb.Environment:
    """Open LMDB with its default flags, which are crash-safe, in a smaller map where address space is short."""
    size = min(_bytes_from_environment("KVTOOL_MAP_START", _MAP_START), map_limit())
    while True:
        try:
            return lmdb.open(
                os.fspath(generation),
                map_size=size,
                max_readers=MAX_READERS,
                mode=0o600,
                readonly=read_only,
                lock=not read_only,
                create=create,
                lib_version=0,
            )
        except (lmdb.MemoryError, MemoryError) as error:
            if size <= _MAP_LEAST:
                raise KvtoolError(f"{generation}: no address space for the store", "raise ulimit -v") from error
            size //= 4
        except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise StoreFormatError(f"{generation} holds an LMDB that is not kvtool's", layout.REBUILD) from error
        except lmdb.Error as error:
            raise KvtoolError(
                f"{generation}: the store cannot be opened: {error}", "check who owns the folder"
            ) from error
