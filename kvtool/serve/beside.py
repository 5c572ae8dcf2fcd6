"""The socket beside a store, by which its user's shell finds the server that has the model loaded."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LONGEST = 100  # bytes of a socket's path that every system takes
_BACKLOG = 64
_CONNECT_S = 2.0
_CREDENTIALS = struct.Struct("3i")  # Linux: process, user, group


def socket_path(store: Path) -> Path:
    """Return the path of a store's socket, whatever links lead to the store."""
    folder = Path(os.path.realpath(store))
    return folder.with_name(f"{folder.name}.sock")


def listen(path: Path) -> socket.socket | None:
    """Listen at a socket that its owner alone can reach; None: another server does, or there are no such sockets.

    Raises
    ------
    OSError : it cannot be made there, or something else stands in its place.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    if (other := connect(path)) is not None:
        other.close()
        return None
    if _is_own_socket(path):  # of a server that was killed
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # it is never there with other rights
    try:
        with _reachable(path) as name:
            bound.bind(name)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(before)
    return bound


def leave(path: Path) -> None:
    """Take a socket away that nobody listens at any more."""
    with suppress(OSError):
        if _is_own_socket(path) and connect(path) is None:
            path.unlink()


def connect(path: Path) -> socket.socket | None:
    """Connect to the server at a socket of this user's; None: there is none."""
    if not hasattr(socket, "AF_UNIX") or not _is_own_socket(path):
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_CONNECT_S)
        with _reachable(path) as name:
            made.connect(name)
        made.settimeout(None)
        if _is_own_peer(made):
            return made
    except OSError:
        pass
    made.close()
    return None


def _is_own_peer(made: socket.socket) -> bool:
    """Return True if this user listens at the other end, or the system cannot say: in a folder of others the socket may
    have been replaced since it was looked at."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    found = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def _is_own_socket(path: Path) -> bool:
    """Return True if this is a socket that the user has made: anybody else's would receive the questions."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


@contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """A name of the path that is short enough for a socket: by its folder, opened, where it is not."""
    if len(os.fsencode(path)) <= _LONGEST or not hasattr(os, "O_PATH"):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
