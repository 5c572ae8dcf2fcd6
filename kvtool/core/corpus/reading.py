"""How the files of one run are read: by which reader, in which process, within which bounds."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self

from kvtool import __version__
from kvtool.core.common.children import python
from kvtool.core.common.marks import Mark
from kvtool.core.corpus import readers
from kvtool.core.corpus.commands import read_by
from kvtool.core.corpus.readers import Document, UnreadableFile, ending_of

_MOST_TEXT = 1 << 27  # characters of a file's text
_MOST_ANSWER = 1 << 31  # bytes of what the process that reads may answer
_FILES_A_CHILD = 200  # after which what libraries have leaked is given back
_PROGRAM = "from kvtool.core.corpus.child import serve\nserve(int(sys.argv[1]), int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What reading one file may take: `seconds`, and `memory` in bytes."""

    seconds: float = 60.0
    memory: int = 2 * 10**9


class Reading:
    """The readers of one run; a context manager, since a process may wait for the next file.

    Parameters
    ----------
    commands : shell-like commands by file ending (`.djvu`), which come before kvtool's own readers.
    bounds : None: the usual ones.
    """

    def __init__(self, commands: Mapping[str, str] | None = None, bounds: Bounds | None = None) -> None:
        self.commands = dict(commands or {})
        self.bounds = bounds or Bounds()
        self._child: _Child | None = None
        self._means: dict[str, str] = {}  # by what picks the reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def takes(self, path: PurePath) -> bool:
        """Whether something reads files of this name."""
        return ending_of(path) in self.commands or readers.is_known(path)

    def refuses(self, path: PurePath) -> bool:
        """Whether the name says that the file holds no text, and nothing reads it."""
        return ending_of(path) not in self.commands and readers.is_foreign(path)

    def settings(self, path: PurePath) -> str:
        """What a file's documents depend on besides its bytes: a digest of the command or plugin that reads it, or
        nothing."""
        command = self.commands.get(ending_of(path))
        if command is None and (plugin := readers.plugin_of(path)) is not None:
            command = str(plugin)
        return "" if command is None else hashlib.sha256(command.encode("utf-8", "surrogatepass")).hexdigest()

    def means(self, path: PurePath) -> str:
        """What it hangs on, besides the file itself, whether it can be read: kvtool, what is installed, the bounds."""
        key = ending_of(path)
        if key not in self._means:
            command = self.commands.get(key)
            tool = "" if command is None else _program(command)
            self._means[key] = repr((__version__, self.settings(path), readers.library_of(path), tool, self.bounds))
        return self._means[key]

    def documents(self, path: Path, data: bytes) -> list[Document]:
        """Read the documents of one file.

        Raises
        ------
        UnreadableFile
            If it holds no text that can be read, or not within the bounds.
        """
        if command := self.commands.get(ending_of(path)):
            return read_by(command, path, self.bounds.seconds, _MOST_TEXT)
        if not readers.is_bounded(path):
            return readers.read_documents(path, data)
        if self._child is None or self._child.files >= _FILES_A_CHILD:
            self._end()
            self._child = _Child(self.bounds)
        try:
            answer = self._child.ask(path, data)
        except BaseException:
            self._end()
            raise
        return _documents(answer)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process that reads files (`corpus/child.py`)."""

    def __init__(self, bounds: Bounds) -> None:
        self.files = 0
        self._bounds = bounds
        seconds = max(1, math.ceil(bounds.seconds))
        self._process = subprocess.Popen(
            python(_PROGRAM, str(seconds), str(bounds.memory)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is this process's to hear
        )

    def ask(self, path: Path, data: bytes) -> dict[str, Any]:
        """Let it read a file; what it answers. Raises UnreadableFile where it has ended instead."""
        self.files += 1
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):
            header = {"path": str(path), "size": len(data), "most": _MOST_TEXT}
            stdin.write(json.dumps(header).encode("ascii") + b"\n")
            stdin.write(data)
            stdin.flush()
        line = stdout.readline(_MOST_ANSWER)
        if not line.endswith(b"\n"):
            raise UnreadableFile(*self._why_ended())
        answer = json.loads(line)
        if answer.get("error") == "MemoryError":
            raise UnreadableFile(*self._too_large)
        return dict(answer)

    def end(self) -> None:
        """End it, whatever it does, with all that it has started."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    @property
    def _too_large(self) -> tuple[str, str]:
        return f"takes over {self._bounds.memory / 1e9:.1f} GB of memory to read", "`--read-memory 8GB` allows more"

    def _why_ended(self) -> tuple[str, str]:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is not None and code == -getattr(signal, "SIGALRM", 0):
            return f"takes over {self._bounds.seconds:g} s to read", "`--read-timeout 10m` allows more"
        return f"damaged: what reads it has crashed (code {code})", "open it in its own program and save it anew"


def _program(command: str) -> str:
    """The program of a command as it is installed: where, and since when; empty where it is not."""
    place = shutil.which(shlex.split(command)[0])
    return f"{place} {os.stat(place).st_mtime_ns}" if place is not None else ""


def _documents(answer: Mapping[str, Any]) -> list[Document]:
    if "error" in answer:
        raise UnreadableFile.from_row(answer)
    return [
        Document(
            one["source"],
            one["text"],
            one["kind"],
            tuple(one["notes"]),
            tuple(Mark(mark["start"], mark["place"]) for mark in one["marks"]),
        )
        for one in answer["documents"]
    ]
