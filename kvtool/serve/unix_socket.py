"""Unix socket next to a store, by which the shell finds the server with the loaded model, and the shell's client.

`kvtool query` imports this module: it must import neither torch nor any library, to start fast.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kvtool.core.common.text import parsed
from kvtool.core.errors import (
    DamagedError,
    GateError,
    KvtoolError,
    NoSpaceError,
    StoreLockedError,
    StoreNotFoundError,
    UsageError,
)

_MAX_PATH = 100  # bytes of a socket's path that every system accepts
_BACKLOG = 64
_CONNECT_TIMEOUT, _READ_TIMEOUT = 2.0, 60.0  # seconds; the server sends a line every ten seconds
PATH = "/query"  # of the application at the socket
KEEP_HEADER = "Kvtool-Keep-Alive"  # seconds that an engine stays after this question (`cli/keep_alive.py`)
_CREDENTIALS = struct.Struct("3i")  # Linux: process, user, group
_BY_CODE: dict[int, type[KvtoolError]] = {
    each.exit_code: each
    for each in (UsageError, StoreNotFoundError, StoreLockedError, GateError, DamagedError, NoSpaceError)
}


def socket_path(store: Path) -> Path:
    folder = Path(os.path.realpath(store))
    return folder.with_name(f"{folder.name}.sock")


def listen(path: Path) -> socket.socket | None:
    """Listen at a socket of this user; None: another server does, or the system has none. Raises OSError."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    if (other := connect(path)) is not None:
        other.close()
        return None
    if _is_own_socket(path):  # of a server that was killed
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # it never has other rights
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
    with suppress(OSError):
        if _is_own_socket(path) and connect(path) is None:
            path.unlink()


def connect(path: Path) -> socket.socket | None:
    """Connect to the server at a socket of this user; None: no server listens."""
    if not hasattr(socket, "AF_UNIX") or not _is_own_socket(path):
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_CONNECT_TIMEOUT)
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
    """Return True if this user listens, or the system cannot tell: others may have replaced the socket in their folder
    since `_is_own_socket`."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    found = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def _is_own_socket(path: Path) -> bool:
    """Return True for a socket of this user: another user's would receive the questions."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


@contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Yield a name of the path that is short enough for a socket: if necessary, by a descriptor of its folder."""
    if len(os.fsencode(path)) <= _MAX_PATH or not hasattr(os, "O_PATH"):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@dataclass(frozen=True, slots=True)
class Declined(Exception):
    """Refusal of a question, which the calling process then answers itself."""

    why: str


def placed(ref: str | None) -> str | None:
    """Return a model's name that is valid in every folder: the absolute path of an existing file, else the name."""
    path = os.path.expanduser(ref) if ref else None
    return os.path.abspath(path) if path and os.path.exists(path) else ref


def ask(
    connected: socket.socket, question: Mapping[str, Any], keep_alive: float = 0.0
) -> Iterator[str | dict[str, Any]]:
    """Ask the server. Yields the pieces of the answer's text, at last its facts. Closing the iterator ends the answer.

    Raises Declined, if the server does not answer, or the KvtoolError that the question would raise in this process.
    """
    connection, begun = HTTPConnection("localhost"), False
    connection.sock = connected
    try:
        connected.settimeout(_READ_TIMEOUT)  # a server stopped by Ctrl-Z accepts connections, too
        kept = {KEEP_HEADER: str(keep_alive)} if keep_alive else {}
        connection.request("POST", PATH, json.dumps(question), {"Content-Type": "application/json"} | kept)
        response = connection.getresponse()
        if response.status != 200:
            raise Declined(f"the server said {response.status}")
        for line in response:
            row = parsed(line)
            if "error" in row:
                failed = row["error"]
                raise _BY_CODE.get(failed["exit_code"], KvtoolError)(failed["message"], failed["hint"])
            if "text" in row:
                begun = True
                yield row["text"]
            elif "answer" in row:
                yield row["answer"]
                return
        raise ConnectionError("the answer has no end")
    except (OSError, HTTPException, ValueError) as error:
        if not begun:
            raise Declined(str(error)) from error
        raise KvtoolError("the server has ended, or hangs, within the answer", "ask again") from error
    finally:
        connection.close()
