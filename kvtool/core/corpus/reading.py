"""File reading of one run: choice of the reader, in a separate process, within bounds."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self

from kvtool.core import __version__
from kvtool.core.common.marks import Mark
from kvtool.core.corpus import readers
from kvtool.core.corpus.bounded import MOST_TEXT, Bounds, Child, Ended
from kvtool.core.corpus.by_command import read_by
from kvtool.core.corpus.readers import Document, EmptyFile, PassingFailure, UnreadableFile, ending_of

_FILES_A_CHILD = 200  # after which what libraries have leaked is given back


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
        self._child: Child | None = None
        self._means: dict[str, str] = {}  # by what picks the reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def takes(self, path: PurePath) -> bool:
        """Return True if files of this name can be read."""
        return ending_of(path) in self.commands or readers.is_known(path)

    def refuses(self, path: PurePath) -> bool:
        """Return True if the name says that the file holds no text, and no command or reader reads it."""
        return ending_of(path) not in self.commands and readers.is_foreign(path)

    def settings(self, path: PurePath) -> str:
        """Return a digest of the command or plugin that reads a file, or "": a file's documents depend on it besides
        the bytes."""
        command = self.commands.get(ending_of(path))
        if command is None and (plugin := readers.plugin_of(path)) is not None:
            command = str(plugin)
        return "" if command is None else hashlib.sha256(command.encode("utf-8", "surrogatepass")).hexdigest()

    def means(self, path: PurePath) -> str:
        """Return all, besides the file itself, that its reading depends on: kvtool, installed tools, bounds."""
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
            return read_by(command, path, self.bounds.seconds, MOST_TEXT)
        if not data:
            raise EmptyFile("empty")
        if not readers.is_bounded(path, len(data)):
            return readers.read_documents(path, data)
        return _documents(self._ask(path, data))

    def _ask(self, path: Path, data: bytes) -> dict[str, Any]:
        """Ask the child process. If it ends, or lacks memory, after other files, a new process is asked: earlier files
        may have caused that."""
        child = self._child
        if child is None or child.files >= _FILES_A_CHILD or not child.runs:
            self._end()
            child = self._child = Child(self.bounds)
        try:
            return child.ask(path, data)
        except Ended as ended:
            self._end()
            if child.files == 1 or ended.late:
                raise (UnreadableFile if ended.late else PassingFailure)(*ended.why) from ended
        except BaseException:
            self._end()
            raise
        return self._ask(path, data)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _program(command: str) -> str:
    """The files of a command as they are there: its program, empty where it is not installed, and what it is told to
    run, as the script of an interpreter. Where they are, and since when."""
    program, *words = shlex.split(command)
    places = [shutil.which(program) or "", *filter(os.path.isfile, words)]
    return " ".join(f"{place} {os.stat(place).st_mtime_ns}" if place else "" for place in places)


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
