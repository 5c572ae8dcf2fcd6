"""A process that reads files within bounds (`corpus/child.py`), seen from the one that asks it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.common.children import python, started

MOST_TEXT = 1 << 27  # characters of a file's text
_MOST_ANSWER = 1 << 31  # bytes of what the process may answer
_AT_ONCE = 1 << 20
_LOOK = 0.1  # seconds between two looks at whether the process is still there
_GRACE = 10.0  # seconds after its own alarm
_PROGRAM = "from kvtool.core.corpus.child import serve\nserve(int(sys.argv[1]), int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the reading of one file: `seconds`, and `memory` in bytes."""

    seconds: float = 60.0
    memory: int = 2 * 10**9


class Ended(Exception):
    """The process has ended over a file, or has no memory for it.

    Attributes
    ----------
    why : what happened, and a hint.
    late : it took too long.
    """

    def __init__(self, why: tuple[str, str], late: bool = False) -> None:
        super().__init__(*why)
        self.why = why
        self.late = late


class Child:
    """A process that reads files, one after another.

    Attributes
    ----------
    files : how many it was given.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.files = 0
        self._bounds = bounds
        seconds = max(1, math.ceil(bounds.seconds))
        self._process = started(
            python(_PROGRAM, str(seconds), str(bounds.memory)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def runs(self) -> bool:
        """Return True if the process still runs."""
        return self._process.poll() is None

    def ask(self, path: Path, data: bytes) -> dict[str, Any]:
        """Let it read a file; what it answers. Raises Ended."""
        self.files += 1
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            header = {"path": str(path), "size": len(data), "most": MOST_TEXT}
            stdin.write(json.dumps(header).encode("ascii") + b"\n")
            stdin.write(data)
            stdin.flush()
        answer = json.loads(self._line())
        if answer.get("error") == "MemoryError":
            why = f"takes over {self._bounds.memory / 1e9:.1f} GB of memory to read"
            raise Ended((why, "`--read-memory 8GB` allows more"))
        return dict(answer)

    def end(self) -> None:
        """End it, whatever it does, with all that it has started."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self._process.wait()

    def _line(self) -> bytes:
        """The line that it writes. The end of its output is not waited for: whom it has started may hold that open.

        Raises
        ------
        Ended : it has not written a whole line before it ended, or its time was up.
        """
        assert self._process.stdout is not None
        pipe, said = self._process.stdout.fileno(), bytearray()
        end = time.monotonic() + self._bounds.seconds + _GRACE
        while len(said) < _MOST_ANSWER:
            runs = self.runs  # asked first: what it wrote before it ended is there then
            if select.select([pipe], [], [], _LOOK if runs else 0)[0]:
                part = os.read(pipe, _AT_ONCE)
                said += part
                if part.endswith(b"\n"):
                    return bytes(said)
                if not part:
                    break
            elif not runs or time.monotonic() > end:
                break
        raise self._ended(is_late=time.monotonic() > end)

    def _ended(self, is_late: bool) -> Ended:
        code = None
        if not is_late:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5)
        if is_late or (code is not None and code == -getattr(signal, "SIGALRM", 0)):
            why = f"takes over {self._bounds.seconds:g} s to read"
            return Ended((why, "`--read-timeout 10m` allows more"), late=True)
        why = f"damaged: what reads it has crashed (code {code})"
        return Ended((why, "open it in its own program and save it anew"))
