"""Packs: a shared store in one file, a zip whose members are stored uncompressed under the names of the values.

An export is a push into a pack, which also takes state checkpoints. An import of a pack, or of another store, is a
pull: every value is checked before it is stored."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.layout import sync_folder
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, UsageError
from kvtool.core.remote.blobs import PrivateBlobs, most_bytes
from kvtool.core.remote.catalogue import HEAD
from kvtool.core.remote.folder import FULL, read_at, temporary_name

_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every member: the same content is the same file
_MOST_OFFSET = 2**62
_BROKEN = (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, ValueError, LookupError, EOFError)


class ArchiveBlobs(PrivateBlobs):
    """Values are the members of an archive; see Blobs. No name is ever a path: nothing is unpacked."""

    def __init__(self, path: Path, file: IO[bytes], archive: zipfile.ZipFile) -> None:
        self.url, self._file, self._archive = str(path), file, archive

    def sizes(self, names: Sequence[str]) -> list[int]:
        members = map(self._member, names)
        return [0 if member is None else member.file_size for member in members]

    def put(self, values: Mapping[str, bytes]) -> None:
        for name, value in values.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.external_attr = 0o600 << 16
            self._archive.writestr(member, value)

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        if before is not None or self._member(name) is not None:
            return False
        self.put({name: after})
        return True

    def names(self, below: str = "") -> Iterator[str]:
        return (name for name in self._archive.namelist() if name.startswith(below))

    def _member(self, name: str) -> zipfile.ZipInfo | None:
        with suppress(KeyError):
            return self._archive.getinfo(name)
        return None

    def _read(self, wanted: BlobRequest) -> bytes | None:
        """Read a value or a part of one; empty if its member is compressed, too large, or not what the archive's
        directory says. Its bytes are not checked here: values have digests."""
        member = self._member(wanted.pack or wanted.name)
        if member is None:
            return None
        start, size = (wanted.start, wanted.most) if wanted.pack else (0, member.file_size)
        is_stored = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        if not is_stored or not 0 <= member.header_offset <= _MOST_OFFSET:
            return b""
        if not wanted.pack and size > min(wanted.most, most_bytes(wanted.name)):
            return b""
        try:
            header = member.FileHeader()
            if read_at(self._file.fileno(), member.header_offset, len(header)) != header:
                return b""
            at = member.header_offset + len(header) + start
            return read_at(self._file.fileno(), at, min(size, member.file_size - start))
        except struct.error:  # of a header that cannot be
            return b""
        except OSError as error:
            raise KvtoolError(f"{self.url} cannot be read: {error.strerror or error}", "check the disk") from error


@contextmanager
def opened_archive(path: Path) -> Iterator[ArchiveBlobs]:
    """Open a pack to be read. Raises UsageError for what is no pack, DamagedError for a part of one."""
    with _opened(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except _BROKEN as error:
            raise DamagedError(f"{path} is no pack, or is cut off: {error}", "get the pack again") from error
        with archive:
            if not any(name == HEAD or name.startswith("catalogue/") for name in archive.namelist()):
                raise UsageError(f"{path} is an archive, but no pack", "name a file that `kvtool store export` wrote")
            yield ArchiveBlobs(path, file, archive)


def _opened(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():  # nor a FIFO, which would hang
            raise UsageError(f"there is no pack at {path}", "name a file that `kvtool store export` wrote")
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check who owns it") from error


@contextmanager
def written_archive(path: Path, force: bool) -> Iterator[ArchiveBlobs]:
    """Open a new pack to be written. The file appears at `path` when all of it is durable, or never. Raises UsageError
    for a path that cannot be written, NoSpaceError."""
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already", "name another file, or replace it with --force")
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):  # of /dev/null nothing else is to be made
        raise UsageError(f"{path} is no file", "name another file: only a file is replaced")
    temporary = path.with_name(temporary_name())
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                yield ArchiveBlobs(path, file, archive)
            file.flush()
            os.fsync(file.fileno())
        _name(temporary, path, force)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in FULL:
            raise NoSpaceError(f"no space to write {path}", "free some disk space, or name another disk") from error
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be written: {reason}", "name a file in a folder that is yours") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path, force: bool) -> None:
    """Give the file its name; without `force` never that of a file that came there meanwhile."""
    if not force:
        try:
            os.link(temporary, path)
            return
        except FileExistsError:
            raise UsageError(f"{path} is there already", "name another file, or replace it with --force") from None
        except OSError:  # a file system without links
            pass
    temporary.replace(path)
