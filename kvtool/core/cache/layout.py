"""Layout of a store's folder, writing of its small files, and the disk space for all of them.

::

    store.json          uuid and format; written before data/ appears
    current             the generation in use, "gen-1"
    data/gen-1/         data.mdb and lock.mdb (LMDB); compacting makes the next generation
    writer.lock         the one writer's lock; writer.json says who holds it
    access.log          which chunks were used when
    served.log          how many chunks questions found and missed
    gate/ index/        side files of the conformance gate and of retrieval
    remote/             the catalogue of the shared store, if this is its local store

Folders are 0700 and files 0600 under any umask: KV is as secret as the text it was made from.

LMDB's own write lock waits forever and ignores Ctrl-C (`kvtool help store-format`); the writer's lock is taken before
it, gives up in time, and names its holder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvtool.core.common.files import TEMPORARY as TEMPORARY
from kvtool.core.common.files import make_folder as make_folder
from kvtool.core.common.files import replace_file
from kvtool.core.common.files import sync_folder as sync_folder
from kvtool.core.common.text import parsed
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import (
    BudgetError,
    DamagedError,
    KvtoolError,
    NoSpaceError,
    StoreFormatError,
    StoreLockedError,
    StoreNotFoundError,
)

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

    def refuse(self, used: int, need: int, free: int) -> BudgetError:
        """Make the error for a commit that does not fit; `free`: bytes of unused pages inside the data file."""
        over = max(used + need - max(0, min(free, need)), self.size + 1)
        if free >= need:
            how = f"`kvtool store compact` gives {megabytes(free)} of free pages back"
        else:
            how = "make room with `kvtool store prune`"
        more = "raise --max-size" if self.given else "raise the budget with `kvtool store prune --budget SIZE`"
        return BudgetError(
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
    code = getattr(error, "code", 0)
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)) or code == errno.EFAULT:
        return DamagedError(f"{folder}: the index of the store is damaged", "run `kvtool store verify`")
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


FORMAT = 1
STORE_FILE, CURRENT_FILE, LOCK_FILE, HOLDER_FILE = "store.json", "current", "writer.lock", "writer.json"
ACCESS_FILE, SERVED_FILE, DATA_FOLDER = "access.log", "served.log", "data"
REMOTE_FOLDER = "remote"  # of the local cache of a shared store
_MOST_READ = 64 * 1024  # of a small file
_GENERATION = re.compile(r"gen-[1-9][0-9]{0,8}")
REPAIR = "run `kvtool store verify --repair`, then ingest again"
RESCUE = "save the undamaged documents with `kvtool store export FILE.kvpack`, and import them into a new store"
REBUILD = "restore the folder from a copy, or ingest into a new store"


def atomic_write(path: Path, data: bytes) -> None:
    """Replace a file durably. Raises NoSpaceError: the old file is untouched."""
    try:
        check_file(path.parent, len(data))
        replace_file(path, data)
    except OSError as error:
        if error.errno in FULL:
            raise NoSpaceError(f"no space to write {path}", "free some disk space and run again") from error
        raise


def read_small(path: Path) -> bytes:
    """Read a small regular file (never a FIFO, which would hang)."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise StoreFormatError(f"{path} is not a regular file", REBUILD)
    with path.open("rb") as file:
        return file.read(_MOST_READ)


def read_uuid(root: Path) -> str:
    """Read the uuid in ``store.json``. Raises StoreNotFoundError, StoreFormatError, DamagedError, KvtoolError."""
    try:
        if not stat.S_ISDIR(root.stat().st_mode):
            raise StoreFormatError(f"{root} is a file, not a store's folder", "name a folder with --store")
        text = read_small(root / STORE_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (root / "data.mdb").exists():
            raise StoreFormatError(f"{root} holds an LMDB that is not kvtool's", "name another folder") from error
        raise StoreNotFoundError(f"there is no store at {root}", _way_to_one(root)) from error
    except OSError as error:
        raise KvtoolError(f"cannot read the store at {root}: {error.strerror}", "check who owns the folder") from error
    try:
        value = parsed(text)
        name, number = value["uuid"], int(value["format"])
        uuid.UUID(name)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{root / STORE_FILE} cannot be read", REBUILD) from error
    check_format(root, number)
    return str(name)  # as it is written: a letter's case is a flipped bit


def check_format(root: Path, number: int) -> None:
    if number != FORMAT:
        raise StoreFormatError(
            f"the store at {root} has format {number}, this kvtool reads format {FORMAT}", "ingest into a new store"
        )


def is_foreign(root: Path) -> bool:
    ours = {LOCK_FILE, HOLDER_FILE}
    others = [name for name in os.listdir(root) if name not in ours and not name.startswith(TEMPORARY)]
    return bool(others) and not (root / STORE_FILE).exists()  # in this order: another process may be making the store


def _way_to_one(root: Path) -> str:
    try:
        if is_foreign(root):
            return "it holds other things, and a store is made only in an empty or a new folder: name one with --store"
    except OSError:  # not there, or not to be listed
        pass
    return "make one with `kvtool ingest PATH`, or name another with --store"


def current_generation(root: Path) -> Path | None:
    """Return the folder of the generation in use; None in a store that was never finished. Raises DamagedError."""
    try:
        name = read_small(root / CURRENT_FILE).decode("ascii", "replace").strip()
    except FileNotFoundError:
        if (root / DATA_FOLDER).exists():
            raise DamagedError(f"{root / CURRENT_FILE} is missing", REBUILD) from None
        return None
    if not _GENERATION.fullmatch(name):
        raise DamagedError(f"{root / CURRENT_FILE} does not name a generation", REBUILD)
    return root / DATA_FOLDER / name


def next_generation(root: Path) -> Path:
    names = os.listdir(root / DATA_FOLDER) if (root / DATA_FOLDER).exists() else []
    numbers = [int(name[4:]) for name in names if _GENERATION.fullmatch(name)]
    return root / DATA_FOLDER / f"gen-{max(numbers, default=0) + 1}"


def point_to(root: Path, generation: Path) -> None:
    atomic_write(root / CURRENT_FILE, generation.name.encode() + b"\n")


def allocate_lock_file(generation: Path, size: int) -> bool:
    """Give ``lock.mdb`` real disk blocks: LMDB maps it, and a hole on a full disk is a SIGBUS. False: no space for it.
    Call only while no environment of this process is open on it (closing any handle drops POSIX locks)."""
    path = generation / "lock.mdb"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise StoreFormatError(f"{path} is not a regular file", REBUILD)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno in FULL:
            return False
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot: nothing to be done
            raise
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def writer_lock(root: Path, wait: float, say: Warn = warn_nobody, what: str = "") -> Iterator[None]:
    """Hold the store's writer lock; the kernel drops it when the process dies. `wait`: seconds to wait for another
    holder; negative: without limit. `say` is told which process it waits for, and `what` the holder does, in words.
    Raises StoreLockedError."""
    import filelock  # 40 ms to import: only writers pay

    what = what or f"{root} is being written by"
    lock = filelock.FileLock(root / LOCK_FILE, mode=0o600, thread_local=False)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if wait:
                say(f"waiting: {what} {_holder(root)}", "")
            lock.acquire(timeout=wait, poll_interval=0.05)
    except filelock.Timeout as error:
        raise StoreLockedError(f"{what} {_holder(root)}", "wait, or pass --lock-wait 10m") from error
    except RuntimeError as error:  # filelock's own deadlock check: this very thread holds it
        raise StoreLockedError(f"{root} is already being written by this process", "end that write first") from error
    except OSError as error:
        raise KvtoolError(f"cannot lock {root}: {error.strerror}", "is the store on a read-only disk?") from error
    try:
        atomic_write(root / HOLDER_FILE, json.dumps({"pid": os.getpid(), "command": _command()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (root / HOLDER_FILE).unlink(missing_ok=True)
        lock.release()


def _command() -> str:
    """Name program and subcommand only: questions and paths are private."""
    words = [Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"]
    words += [word for word in sys.argv[1:2] if word.isalpha()]
    return "".join(c if c.isprintable() else "?" for c in " ".join(words))[:80]


def _holder(root: Path) -> str:
    try:
        value = parsed(read_small(root / HOLDER_FILE))
        return f"process {int(value['pid'])} ({str(value['command'])[:80]})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, KvtoolError):
        return "another process"
