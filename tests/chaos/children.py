"""Work in a forked child, so that what kills it is seen. The parent must have one thread and no store open."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOST_POOL = "Invalid thread pool!"
Outcome = tuple[str, list[str]]  # what came of a fault, and what of it is wrong


@dataclass(frozen=True, slots=True)
class Ended:
    """What ended a child: a signal's name, or that it hung; what its work returned; or the traceback of its error."""

    killed_by: str
    value: Any = None
    trouble: str = ""

    @property
    def why(self) -> str:
        return self.killed_by or self.trouble[-1500:]


def in_child(work: Callable[[], Any], seconds: float = 60.0, kill_after: float | None = None) -> Ended:
    """Run `work`, whose result must be JSON, in a child of this process.

    About once in a thousand forks torch has lost its pool of threads in the child, which fails at its first product;
    another takes its place then. After `kill_after` seconds it gets SIGKILL.
    """
    ended = _in_child(work, seconds, kill_after)
    while _LOST_POOL in ended.trouble:
        ended = _in_child(work, seconds, kill_after)
    return ended


def kill_at(number: int, *points: tuple[object, str]) -> list[int]:
    """Let this process get SIGKILL at the number-th step of these functions; 0: never. A call is two steps: before it
    and after it. Returns the count of steps so far, as the item of a list."""
    steps = [0]

    def step() -> None:
        steps[0] += 1
        if steps[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            step()
            result = real(*args, **more)
            step()
            return result

        return counted

    for owner, name in points:
        setattr(owner, name, counting(getattr(owner, name)))
    return steps


def _in_child(work: Callable[[], Any], seconds: float, kill_after: float | None) -> Ended:
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        _child(work, into)
    os.close(into)
    said, hung = _read(out, time.monotonic() + (seconds if kill_after is None else kill_after))
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hung and kill_after is None:
        return Ended(f"hung for {seconds:.0f} s")
    if os.WIFSIGNALED(status):
        return Ended(signal.Signals(os.WTERMSIG(status)).name)
    return Ended("", **json.loads(said))


def _child(work: Callable[[], Any], into: int) -> None:
    """Never returns."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(quiet, handle)
    try:
        said = {"value": work()}
    except BaseException:
        said = {"trouble": traceback.format_exc()}
    with os.fdopen(into, "wb") as file:
        file.write(json.dumps(said).encode())
    os._exit(0)


def _read(handle: int, deadline: float) -> tuple[bytes, bool]:
    """All that is written, and whether that took too long."""
    parts: list[bytes] = []
    with os.fdopen(handle, "rb", buffering=0) as file:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0]:
                part = file.read(1 << 16)
                if not part:
                    return b"".join(parts), False
                parts.append(part)
    return b"".join(parts), True
