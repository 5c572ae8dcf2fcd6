"""Reading a file by a command of the user's: the file's path in, text on stdout."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtool.core.common.children import started
from kvtool.core.common.marks import Mark
from kvtool.core.corpus.commands import PATH
from kvtool.core.corpus.readers import Document, PassingFailure, source_of
from kvtool.core.corpus.readers.document import numbered
from kvtool.core.corpus.readers.encoding import decode

_LOOK = 0.02  # seconds between two looks at a command's output
_TOLD = 200  # characters of what a command says on stderr


def read_by(command: str, path: Path, seconds: float, most: int) -> list[Document]:
    """Read a file by a command, without a shell; what a form feed parts are its pages. Without one a place is a line of
    what the command says, and called so: the file has no such line.

    Parameters
    ----------
    seconds : how long it may take; it is killed then, with all that it has started.
    most : bytes that it may say.

    Raises
    ------
    PassingFailure
        If it cannot be started, takes or says too much, ends with another code than 0, or says nothing.
    """
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
        return [Document(source_of(path), text, "text", notes, tuple(_lines(text)))]
    document = numbered(source_of(path), "text", "p.", pages)
    return [replace(document, notes=notes)]


def _lines(text: str) -> Iterator[Mark]:
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Mark(start, f"text line {number}")
        start += len(line) + 1


def _run(words: Sequence[str], said: int, complained: int, seconds: float, most: int) -> int:
    """The exit code of a command. Raises PassingFailure where it has to be killed."""
    try:
        child = started(words, stdin=subprocess.DEVNULL, stdout=said, stderr=complained)
    except OSError as error:
        raise PassingFailure(f"{words[0]} cannot be started: {error.strerror}", "check the reader's command") from error
    end = time.monotonic() + seconds
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK)
            if max(os.fstat(said).st_size, os.fstat(complained).st_size) > most:
                raise PassingFailure(f"{words[0]} says more than {most >> 20} MiB")
            if child.returncode is not None:
                return child.returncode
            if time.monotonic() > end:
                raise PassingFailure(f"{words[0]} takes over {seconds:g} s", "`--read-timeout 10m` allows more")
    finally:
        with suppress(ProcessLookupError, PermissionError):  # also what it has left behind
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
