"""Container format of a pack: a zip whose members are stored uncompressed, KV as safetensors.

Raw KV is stored as tensors that every reader of safetensors can open; other levels as the bytes of their records."""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, deserialize

from kvtool.core.cache.layout import TEMPORARY, sync_folder
from kvtool.core.cache.record import Bytes, KVHeader, decode_record, encode_record
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, UsageError

_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every member: the same content is the same file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN = (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, ValueError, LookupError, EOFError)

CATALOGUE = "catalogue"  # the member's name; other members have the names of a shared store's values, except KV


def kv_member(key: str, level: str, mark: str) -> str:
    return f"kv/{key}/{level}-{mark}.safetensors"


@contextmanager
def writing(path: Path, force: bool) -> Iterator[Callable[[str, bytes], None]]:
    """Write a pack. The file appears at `path` when all of it is durable, or never. Yields a function that adds a
    member with a name and bytes. Raises UsageError for a path that cannot be written, NoSpaceError."""
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already", "name another file, or replace it with --force")
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):  # of /dev/null nothing else is to be made
        raise UsageError(f"{path} is no file", "name another file: only a file is replaced")
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as pack:
                yield lambda name, data: _add(pack, name, data)
            file.flush()
            os.fsync(file.fileno())
        _put(temporary, path, force)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(f"no space to write {path}", "free some disk space, or name another disk") from error
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be written: {reason}", "name a file in a folder that is yours") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _add(pack: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.external_attr = 0o600 << 16
    pack.writestr(member, data)


def _put(temporary: Path, path: Path, force: bool) -> None:
    """Put the file in its place; without `force` never over what came there meanwhile."""
    if force:
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise UsageError(f"{path} is there already", "name another file, or replace it with --force") from None
    except OSError:  # a file system without links
        temporary.rename(path)


class PackReader:
    """Members of a pack by name. No name is ever a path: nothing is unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path)
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._members = {member.filename: member for member in self._zip.infolist()}
        except _BROKEN as error:
            self._file.close()
            raise DamagedError(f"{path} is no pack, or is cut off: {error}", "get the pack again") from error

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def size(self, name: str) -> int:
        member = self._members.get(name)
        return 0 if member is None else member.file_size

    def get(self, name: str, most: int) -> bytes | None:
        """Read a member; None if it is missing, empty if it is damaged, compressed or larger than `most` bytes."""
        member = self._members.get(name)
        if member is None:
            return None
        if member.compress_type != zipfile.ZIP_STORED or not member.file_size == member.compress_size <= most:
            return b""
        try:
            return self._zip.read(member) if self._has_its_header(member) else b""
        except _BROKEN:
            return b""
        except OSError as error:
            raise KvtoolError(f"{self.path} cannot be read: {error.strerror or error}", "check the disk") from error

    def _has_its_header(self, member: zipfile.ZipInfo) -> bool:
        self._file.seek(member.header_offset)
        wanted = member.FileHeader()
        return self._file.read(len(wanted)) == wanted

    def close(self) -> None:
        self._zip.close()
        self._file.close()


def _opened(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():  # nor a FIFO, which would hang
            raise UsageError(f"there is no pack at {path}", "name a file that `kvtool store export` wrote")
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check who owns it") from error


# ---- a chunk's records at one level, as a safetensors file -------------------------------------------------------

Part = tuple[str, list[int], Bytes]  # dtype as safetensors names it, shape, bytes

MOST_HEADER = 2**24
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def to_safetensors(chunk_id: bytes, level: str, records: Sequence[bytes]) -> bytes:
    """Write records of all layers as one file: `layers.N.k` and `layers.N.v`, or `layers.N` for what is encoded."""
    parts: dict[str, Part] = {}
    for layer, record in enumerate(records):
        header, payload = decode_record(chunk_id, record)
        if level_of(level).verbatim:
            shape, name = [header.kv_heads, header.tokens], _NAMES[header.dtype]
            parts[f"layers.{layer}.k"] = (name, [*shape, header.head_dim_k], payload[: header.k_bytes])
            parts[f"layers.{layer}.v"] = (name, [*shape, header.head_dim_v], payload[header.k_bytes :])
        else:
            parts[f"layers.{layer}"] = ("U8", [len(record)], record)
    rows: dict[str, Any] = {"__metadata__": {"chunk": chunk_id.hex(), "level": level}}
    at = 0
    for name, (dtype, dims, data) in parts.items():
        rows[name] = {"dtype": dtype, "shape": dims, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, _, data in parts.values())])


def from_safetensors(chunk_id: bytes, level: str, layers: int, data: Bytes) -> list[bytes]:
    """Inverse of :func:`to_safetensors`; what the records are worth their own digests say. Raises DamagedError."""
    try:
        tensors = deserialize(bytes(data))  # type: ignore[no-untyped-call]
        parts = {name: (row["dtype"], row["shape"], row["data"]) for name, row in tensors}
        if not level_of(level).verbatim:
            return [bytes(parts[f"layers.{layer}"][2]) for layer in range(layers)]
        return [
            _raw(chunk_id, layer, parts[f"layers.{layer}.k"], parts[f"layers.{layer}.v"]) for layer in range(layers)
        ]
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedError(f"KV that cannot be read: {error!r}") from error


def _raw(chunk_id: bytes, layer: int, keys: Part, values: Part) -> bytes:
    (dtype, (heads, tokens, dim_k), k_bytes), (other, (heads_v, tokens_v, dim_v), v_bytes) = keys, values
    if (dtype, heads, tokens) != (other, heads_v, tokens_v):
        raise ValueError("keys and values do not fit each other")
    header = KVHeader(_DTYPES[dtype], heads, tokens, dim_k, dim_v, RAW, layer)
    return encode_record(chunk_id, header, [k_bytes, v_bytes])
