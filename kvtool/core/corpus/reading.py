"""Readers of one run, user commands, and the process that reads hostile-prone formats: an alarm bounds its time, a
limit of the address space its memory. A request is a line of JSON and the file's bytes on stdin, an answer a line of
JSON on stdout."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Self

from kvtool.core import __version__
from kvtool.core.common.children import limit_process, python, started
from kvtool.core.common.marks import Mark
from kvtool.core.corpus import readers
from kvtool.core.corpus.options import PATH
from kvtool.core.corpus.readers import ending_of, read_documents, source_of
from kvtool.core.corpus.readers.document import Document, EmptyFile, PassingFailure, UnreadableFile, numbered
from kvtool.core.corpus.readers.encoding import chosen, decode
from kvtool.core.corpus.tables import line_marks

MOST_TEXT = 1 << 27  # characters of a file's text
_FILES_A_CHILD = 200  # after which what libraries have leaked is given back
_MOST_ANSWER = 1 << 31  # bytes of what the process may answer
_AT_ONCE = 1 << 20
_LOOK = 0.1  # seconds between two looks at whether the process is still there
_GRACE = 10.0  # seconds after its own alarm
_COMMAND_LOOK = 0.02  # seconds between two looks at a command's output
_TOLD = 200  # characters of what a command says on stderr
_PROGRAM = "from kvtool.core.corpus.reading import serve\nserve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"


@dataclass(frozen=True, slots=True)
class Bounds:
    seconds: float = 60.0
    memory: int = 2 * 10**9


class Reading:
    """The readers of one run. `commands` by file ending (`.djvu`) come first; an empty `encoding` is guessed."""

    def __init__(
        self, commands: Mapping[str, str] | None = None, bounds: Bounds | None = None, encoding: str = ""
    ) -> None:
        self.commands = dict(commands or {})
        self.bounds = bounds or Bounds()
        self.encoding = encoding and codecs.lookup(encoding).name
        self._child: Child | None = None
        self._means: dict[str, str] = {}  # by what picks the reader
        self._settings: dict[tuple[str, bool], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_child()

    def takes(self, path: PurePath) -> bool:
        return ending_of(path) in self.commands or readers.is_known(path)

    def refuses(self, path: PurePath) -> bool:
        return ending_of(path) not in self.commands and readers.is_foreign(path)

    def settings(self, path: PurePath, is_whole: bool = False) -> str:
        """Digest of what a file's documents depend on besides its bytes; `is_whole`: as if no library were missing."""
        key = ending_of(path), is_whole
        if key not in self._settings:
            command = self.commands.get(key[0])
            if command is None and (plugin := readers.plugin_of(path)) is not None:
                command = str(plugin)
            missing = [] if is_whole else readers.missing_inside(path)
            given = "\0".join([readers.REVISION, command or "", self.encoding or "", *missing])
            self._settings[key] = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
        return self._settings[key]

    def means(self, path: PurePath) -> str:
        key = ending_of(path)
        if key not in self._means:
            command = self.commands.get(key)
            tool = "" if command is None else _program(command)
            self._means[key] = repr((__version__, self.settings(path), readers.library_of(path), tool, self.bounds))
        return self._means[key]

    def documents(self, path: Path, data: bytes) -> list[Document]:
        token = chosen.set(self.encoding)
        try:
            if command := self.commands.get(ending_of(path)):
                return _read_by(command, path, self.bounds.seconds, MOST_TEXT)
            if not data:
                raise EmptyFile("empty")
            if not readers.is_bounded(path, len(data)):
                return read_documents(path, data)
            return _documents(self._ask(path, data))
        finally:
            chosen.reset(token)

    def _ask(self, path: Path, data: bytes) -> dict[str, Any]:
        child = self._child
        if child is None or child.files >= _FILES_A_CHILD or not child.runs:
            self._end_child()
            child = self._child = Child(self.bounds, self.encoding)
        try:
            return child.ask(path, data)
        except _Ended as ended:
            self._end_child()
            if child.files == 1 or ended.late:
                raise (UnreadableFile if ended.lasts else PassingFailure)(*ended.why) from ended
        except BaseException:
            self._end_child()
            raise
        return self._ask(path, data)

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _program(command: str) -> str:
    program, *words = shlex.split(command)
    places = [shutil.which(program) or "", *filter(os.path.isfile, words)]
    return " ".join(f"{place} {os.stat(place).st_mtime_ns}" if place else "" for place in places)


def _documents(answer: Mapping[str, Any]) -> list[Document]:
    if "error" in answer:
        raise UnreadableFile.from_row(answer)
    return [
        Document(**{**one, "notes": tuple(one["notes"]), "marks": tuple(Mark(**mark) for mark in one["marks"])})
        for one in answer["documents"]
    ]


class _Ended(Exception):
    """The process has ended, or lacks memory. `why`: message and hint; `lasts`: another try would end the same way."""

    def __init__(self, why: tuple[str, str], late: bool = False, lasts: bool = False) -> None:
        super().__init__(*why)
        self.why = why
        self.late = late
        self.lasts = late or lasts


class Child:
    def __init__(self, bounds: Bounds, encoding: str = "") -> None:
        self.files = 0
        self._bounds = bounds
        seconds = max(1, math.ceil(bounds.seconds))
        self._process = started(
            python(_PROGRAM, str(seconds), str(bounds.memory), encoding),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, path: Path, data: bytes) -> dict[str, Any]:
        """Let it read a file. Raises _Ended."""
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
            why = f"takes over {self._bounds.memory / 1e9:.1f} GB of memory to read", "`--read-memory 8GB` allows more"
            raise _Ended(why, lasts=True)
        return dict(answer)

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self._process.wait()

    def _line(self) -> bytes:
        """Read its answer, not to the end of the pipe, which its own children may hold open. Raises _Ended."""
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

    def _ended(self, is_late: bool) -> _Ended:
        code = None
        if not is_late:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5)
        if is_late or code == -signal.SIGALRM:
            why = f"takes over {self._bounds.seconds:g} s to read", "`--read-timeout 10m` allows more"
            return _Ended(why, late=True)
        why = f"damaged: what reads it has crashed (code {code})", "open it in its own program and save it anew"
        return _Ended(why)


def serve(seconds: int, memory: int, encoding: str) -> None:
    """Read files until stdin ends; SIGALRM ends the process when one takes over `seconds`."""
    chosen.set(encoding)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a library's output is sent to stderr, which is not read
    limit_process(memory)
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        data = sys.stdin.buffer.read(asked["size"])
        signal.alarm(seconds)
        answer = json.dumps(_answer(Path(asked["path"]), data, asked["most"]))
        signal.alarm(0)  # before the answer is written: then it is the next file that is read
        answers.write(answer + "\n")
        answers.flush()


def _answer(path: Path, data: bytes, most: int) -> dict[str, Any]:
    try:
        documents = read_documents(path, data)
        if sum(len(document.text) for document in documents) > most:
            raise UnreadableFile(f"holds more than {most:,} characters of text", "split it")
        return {"documents": [asdict(document) for document in documents]}
    except UnreadableFile as error:
        return error.to_row()
    except MemoryError:
        return {"error": "MemoryError"}
    except RecursionError:
        return {"error": "UnreadableFile", "message": "damaged: parts within parts without end", "hint": ""}
    except Exception as error:  # whatever a library raises over a broken file
        what = f"{type(error).__name__}: {error}".rstrip(": ")[:200]
        return {"error": "UnreadableFile", "message": f"damaged, or not what its name says ({what})", "hint": ""}


def _read_by(command: str, path: Path, seconds: float, most: int) -> list[Document]:
    """Read a file by a command, without a shell; form feeds separate pages. Raises PassingFailure."""
    words = [word.replace(PATH, str(path)) for word in shlex.split(command)]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        code = _run(words, said.fileno(), complained.fileno(), seconds, most)
        if code:
            complained.seek(0)
            why = complained.read(_TOLD).decode("utf-8", "replace").strip().replace("\n", "; ")
            raise PassingFailure(f"{words[0]} ended with code {code}" + (f": {why}" if why else ""))
        said.seek(0)
        text, notes = decode(said.read())
    pages = text.split("\f")
    if len(pages) == 1:
        marks = tuple(Mark(mark.start, f"text line {mark.place}") for mark in line_marks(text))
        return [Document(source_of(path), text, "text", notes, marks)]
    return [replace(numbered(source_of(path), "text", "p.", pages), notes=notes)]


def _run(words: Sequence[str], said: int, complained: int, seconds: float, most: int) -> int:
    try:
        child = started(words, stdin=subprocess.DEVNULL, stdout=said, stderr=complained)
    except OSError as error:
        raise PassingFailure(f"{words[0]} cannot be started: {error.strerror}", "check the reader's command") from error
    end = time.monotonic() + seconds
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_COMMAND_LOOK)
            if max(os.fstat(said).st_size, os.fstat(complained).st_size) > most:
                raise PassingFailure(f"{words[0]} says more than {most >> 20} MiB")
            if child.returncode is not None:
                return child.returncode
            if time.monotonic() > end:
                raise PassingFailure(f"{words[0]} takes over {seconds:g} s", "`--read-timeout 10m` allows more")
    finally:
        with suppress(ProcessLookupError, PermissionError):  # also processes that it has left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
