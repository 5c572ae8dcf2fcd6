"""kvtool's commands in a forked child: as another process runs them, and killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from tests.cli.working import Done, kvtool
from tests.faults.harness.children import in_child

_SECONDS = 120.0  # longer than any command on a busy machine
_COUNTED = ("/kvtool/core/cache/", "/kvtool/core/remote/", "/kvtool/core/upkeep/", "/kvtool/core/pack/")


class HungError(AssertionError):
    """A command that a signal ended, or that did not end."""


def command(*words: object) -> Done:
    """Run a command to its end. Nothing of a store may be open here."""
    done = killed(0, *words)
    assert done is not None
    return done


def killed(at: int, *words: object) -> Done | None:
    """Run a command that gets SIGKILL at its call number `at` of the code that writes; None: it was killed.

    Calls are counted, and no time, so that the same number ends it at the same place.
    """
    ended = in_child(lambda: _run(words, at), _SECONDS)
    if at and ended.killed_by == "SIGKILL":
        return None
    if ended.value is None:
        raise HungError(f"{words[0]}: {ended.killed_by or ended.trouble[-1500:]}")
    return Done(**ended.value)


def _run(words: tuple[object, ...], at: int = 0) -> dict[str, Any]:
    if at:
        left = at

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event == "call" and any(part in frame.f_code.co_filename for part in _COUNTED):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
    done = kvtool(*words)
    sys.setprofile(None)
    return {"code": done.code, "out": done.out, "err": done.err}
