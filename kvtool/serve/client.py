"""Client of the server next to a store, for the shell. It must import neither torch nor any library, to start fast."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from kvtool.core.common.json_text import parsed
from kvtool.core.errors import (
    DamagedError,
    GateError,
    KvtoolError,
    NoSpaceError,
    StoreLockedError,
    StoreNotFoundError,
    UsageError,
)

PATH = "/query"
_PATIENCE = 60.0  # seconds without a sign of life, of which there is one every ten
_BY_CODE: dict[int, type[KvtoolError]] = {
    each.exit_code: each
    for each in (UsageError, StoreNotFoundError, StoreLockedError, GateError, DamagedError, NoSpaceError)
}


@dataclass(frozen=True, slots=True)
class Declined(Exception):
    """The server does not answer this one; the asking process has to do it itself."""

    why: str


def placed(ref: str | None) -> str | None:
    """Return a model's name that is valid in every folder: the absolute path of an existing one, else its name."""
    path = os.path.expanduser(ref) if ref else None
    return os.path.abspath(path) if path and os.path.exists(path) else ref


class _Connection(HTTPConnection):
    """HTTP over a socket that is connected already."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__("localhost")
        self.sock = connected


def ask(connected: socket.socket, question: Mapping[str, Any]) -> Iterator[str | dict[str, Any]]:
    """Ask the server: pieces of the answer's text as they come, and at last what there is to say of it.

    Who stops listening ends the answer.

    Raises
    ------
    Declined : nothing was answered yet, and nothing will be.
    KvtoolError : as the same question would have raised it here.
    """
    connection = _Connection(connected)
    begun = False
    try:
        connected.settimeout(_PATIENCE)  # one that was stopped, by Ctrl-Z, takes connections all the same
        connection.request("POST", PATH, json.dumps(question), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Declined(f"the server said {response.status}")
        for line in response:
            row = parsed(line)
            if "error" in row:
                raise _error(row["error"])
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


def _error(facts: Mapping[str, Any]) -> KvtoolError:
    kind = _BY_CODE.get(facts["exit_code"], KvtoolError)
    return kind(facts["message"], facts["hint"])
