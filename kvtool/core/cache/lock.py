"""The writer's lock: one writer a store, found out in time, with the holder's name.

LMDB's own write lock waits for ever and ignores Ctrl-C (kvtool/docs/store-format.md); this one is taken before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtool.core.cache import layout
from kvtool.core.common.json_text import parsed
from kvtool.core.errors import KvtoolError, StoreLockedError


@contextlib.contextmanager
def writer_lock(root: Path, wait: float) -> Iterator[None]:
    """Hold the store's writer lock; the kernel drops it when the process dies.

    Parameters
    ----------
    wait : seconds to wait for another holder; negative: for ever.

    Raises
    ------
    StoreLockedError : somebody else still holds it; says who.
    """
    import filelock  # 40 ms to import: only writers pay

    lock = filelock.FileLock(root / layout.LOCK_FILE, mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=wait if wait > 0 or wait < 0 else 0, poll_interval=0.05)
    except filelock.Timeout as error:
        raise StoreLockedError(
            f"{root} is being written by {_holder(root)}", "wait, or pass --lock-wait SECONDS"
        ) from error
    except RuntimeError as error:  # filelock's own deadlock check: this very thread holds it
        raise StoreLockedError(f"{root} is already being written by this process", "end that write first") from error
    except OSError as error:
        raise KvtoolError(f"cannot lock {root}: {error.strerror}", "is the store on a read-only disk?") from error
    try:
        layout.atomic_write(root / layout.HOLDER_FILE, json.dumps({"pid": os.getpid(), "command": _command()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (root / layout.HOLDER_FILE).unlink(missing_ok=True)
        lock.release()


def _command() -> str:
    """Program and subcommand only: a question or a path is nobody else's business."""
    words = [Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"]
    words += [word for word in sys.argv[1:2] if word.isalpha()]
    return "".join(c if c.isprintable() else "?" for c in " ".join(words))[:80]


def _holder(root: Path) -> str:
    try:
        value = parsed(layout.read_small(root / layout.HOLDER_FILE))
        return f"process {int(value['pid'])} ({str(value['command'])[:80]})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, KvtoolError):
        return "another process"
