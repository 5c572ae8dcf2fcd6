"""Transfers that end their own process at a known moment; without torch, which would take each child seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.remote import blobs as blobs_module
from kvtool.core.remote import send
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push

Moment = tuple[str, int, bool]  # a method, which of its calls, whether it is over by then


def dying(owner: type, moment: Moment) -> None:
    """Let this process end there as by `kill -9`."""
    name, number, is_over = moment
    real: Callable[..., Any] = getattr(owner, name)
    calls = []

    def wrapped(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not is_over:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **more)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def pushing(path: Path, url: str, moment: Moment, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    send.PACK_BYTES = 1
    blobs_module.LEASES["sweep"] = 0.4  # some stores keep the time themselves; the next push waits for a dead one
    with Store.open(path) as store, closing(open_blobs(url)) as blobs:
        dying(type(blobs), moment)
        push(store, blobs, PushOptions(delete=True))


def pulling(path: Path, url: str, moment: Moment, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    dying(Writer, moment)
    with closing(open_blobs(url)) as blobs:
        pull(path, blobs)
