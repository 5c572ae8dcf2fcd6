"""kvtool's commands in a forked child: as another process runs them, and killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from types import FrameType
from typing import Any

from tests.chaos.children import in_child
from tests.cli.working import Done, kvtool

KILLED = -signal.SIGKILL
_SECONDS = 120.0  # longer than any command on a busy machine
_COUNTED = ("/kvtool/core/cache/", "/kvtool/core/remote/", "/kvtool/core/upkeep/")


def command(*words: object, kill_at: int = 0) -> Done:
    """Run a command, with nothing of a store open here; it gets SIGKILL at its call number `kill_at` of the code that
    writes, and ends with KILLED then.

    Calls are counted, and no time, so that the same number ends it at the same place.
    """
    ended = in_child(lambda: _run(words, kill_at), _SECONDS)
    if kill_at and ended.killed_by == "SIGKILL":
        return Done(KILLED, "", "")
    assert ended.value is not None, f"{words[0]}: {ended.why}"
    return Done(**ended.value)


def _run(words: tuple[object, ...], left: int) -> dict[str, Any]:
    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and any(part in frame.f_code.co_filename for part in _COUNTED):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    if left:
        sys.setprofile(count)
    done = kvtool(*words)
    sys.setprofile(None)
    return asdict(done)
