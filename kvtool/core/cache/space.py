"""Disk space: looked at before a commit, and named as the cause after a failed one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError

_DEFAULT_RESERVE = 64 * 2**20
SMALL_FILE = 64 * 1024  # notes of the writer and of what was dropped have to fit on a full disk
_HINT = "free some disk space; with a little of it `kvtool store prune` or `kvtool compress --drop-raw` gives back more"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve() -> int:
    text = os.environ.get("KVTOOL_DISK_RESERVE", "")
    return int(text) if text.isdecimal() else _DEFAULT_RESERVE


def disk_free(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def check_disk(folder: Path, need: int, reusable: int, spare: int) -> None:
    """Refuse a commit that would fill the disk, of which `spare` bytes stay free; LMDB takes `reusable` first."""
    free = disk_free(folder)
    if need - reusable > 0 and free - spare < need - reusable:
        raise NoSpaceError(
            f"{folder} has {megabytes(free)} free; {megabytes(need)} and a reserve of {megabytes(spare)} are needed",
            _HINT,
        )


def check_copy(folder: Path, live: int, file: int) -> None:
    """Refuse a compaction whose copy of `live` bytes would fill the disk. One that gives back more than it takes
    meanwhile may use the reserve, too: it is there for a full disk."""
    free, spare = disk_free(folder), 0 if file - live > live else reserve()
    if free - spare < live:
        inside = megabytes(max(0, file - live))
        raise NoSpaceError(
            f"the store's file cannot shrink: {folder} has {megabytes(free)} free; {megabytes(live)} for a copy "
            f"and a reserve of {megabytes(spare)} are needed",
            f"free that much and run `kvtool store compact`; until then new records take the file's own free {inside}",
        )


def check_file(folder: Path, size: int) -> None:
    """Refuse a side file that would fill the disk. Raises OSError (`ENOSPC`), as the disk itself would: a caller whose
    file can be made again continues without it."""
    if size > SMALL_FILE and disk_free(folder) - reserve() < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(folder))


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum bytes of the files in a store's folder, kept to one batch; `given` for one command (`--max-size`)."""

    size: int
    given: bool = False

    def refuse(self, used: int, need: int, free: int) -> NoSpaceError:
        """Make the error for a commit that does not fit; `free`: bytes of unused pages inside the data file."""
        over = max(used + need - max(0, min(free, need)), self.size + 1)
        if free >= need:
            how = f"`kvtool store compact` gives {megabytes(free)} of free pages back"
        else:
            how = "make room with `kvtool store prune`"
        more = "raise --max-size" if self.given else "raise the budget with `kvtool store prune --budget SIZE`"
        return NoSpaceError(
            f"the store would grow to {megabytes(over)}, over its budget of {megabytes(self.size)}", f"{how}, or {more}"
        )


def folder_bytes(root: Path) -> int:
    total = 0
    for at, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                total += os.lstat(os.path.join(at, name)).st_size
    return total


def explain(error: lmdb.Error, folder: Path, need: int) -> KvtoolError:
    """Translate a failed LMDB write. A full disk, a quota and a file size limit all show as `Input/output error`: a
    test write distinguishes them from damage."""
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)):
        return DamagedError(f"{folder}: the index of the store is damaged", "run `kvtool store verify`")
    code = getattr(error, "code", 0)
    if code in FULL or ((code == errno.EIO or isinstance(error, lmdb.DiskError)) and _is_full(folder, need)):
        free = megabytes(disk_free(folder))
        return NoSpaceError(
            f"{folder}: no space for {megabytes(need)} ({free} free, or a quota or limit was met)", _HINT
        )
    return KvtoolError(f"{folder}: the store cannot be written: {error}", "nothing that was committed is lost")


def _is_full(folder: Path, need: int) -> bool:
    return disk_free(folder) < need + reserve() or _over_file_limit(folder, need) or _over_quota(folder, need)


def _over_file_limit(folder: Path, need: int) -> bool:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit != resource.RLIM_INFINITY and (folder / "data.mdb").stat().st_size + need > limit


def _over_quota(folder: Path, need: int) -> bool:
    probe = folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(need, 1))
        finally:
            os.close(handle)
    except OSError as error:
        return error.errno in FULL
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return False
