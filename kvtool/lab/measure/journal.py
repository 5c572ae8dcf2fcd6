"""Results of a long evaluation, kept a line a question, so that it can be killed and go on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtool.core.common.files import make_folder
from kvtool.core.common.json_text import escaped, parsed
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.evaluate.measures import Row


class Journal:
    """Rows of runs by question, in memory and (where a file is named) on disk.

    Line 1 holds the facts under which all others were measured. A question's runs may stand in several lines; the first
    row of a run counts. What follows the last line's end was torn by a kill: it is ignored, and overwritten.

    Parameters
    ----------
    path : None keeps nothing.
    facts : JSON values; a file with others is refused.
    kind : the command that writes it; a file of another one is refused.

    Raises
    ------
    UsageError : the file holds something else, or was made under other facts.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any], kind: str = "kvtool inspect quality") -> None:
        self.rows: dict[int, dict[str, Row]] = {}
        self._path = path
        self._kind = kind
        self._facts = json.loads(json.dumps(facts))
        self._sound = 0  # bytes of whole lines
        self._read()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file for `add`; what another process has written meanwhile is read first.

        Raises
        ------
        KvtoolError : another process writes it, or it cannot be written.
        """
        if self._path is None:
            yield
            return
        import filelock

        lock = filelock.FileLock(f"{self._path}.lock", mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise KvtoolError(
                f"{self._path} is being written by another process", "wait for it, or give another --resume file"
            ) from error
        try:
            self._read()
            self._repair(self._path)
            yield
        finally:
            lock.release()

    def add(self, index: int, key: str | None, rows: Mapping[str, Row]) -> None:
        """Keep a finished question's rows by name of run; `index`, `key`: its place and its id in the batch."""
        self._merge(index, rows)
        if self._path is not None:
            self._append(self._path, {"index": index, "id": key, "runs": rows})

    # ---- the file ----

    def _append(self, path: Path, value: Mapping[str, Any]) -> None:
        line = escaped(json.dumps(value, ensure_ascii=False)).encode() + b"\n"
        with path.open("ab") as file:
            file.write(line)
        self._sound += len(line)

    def _repair(self, path: Path) -> None:
        """Cut a torn line off; begin a new file."""
        make_folder(path.parent)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.truncate(self._sound)
        if not self._sound:
            self._append(path, {"type": self._kind, "facts": self._facts})

    def _read(self) -> None:
        self._sound = 0
        try:
            data = self._path.read_bytes() if self._path is not None else b""
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror}", "give a file to --resume") from error
        beginning = json.dumps({"type": self._kind})[:-1].encode()
        if not (data.startswith(beginning) or beginning.startswith(data)):
            raise self._strange()
        *lines, _ = data.split(b"\n")
        for number, line in enumerate(lines):
            try:
                value = parsed(line)
                if number:
                    self._merge(int(value["index"]), dict(value["runs"]))
            except (ValueError, KeyError, TypeError) as error:
                if number and number == len(lines) - 1:  # torn, too: a machine that went down leaves such
                    return
                raise self._strange(number + 1) from error
            if not number:
                self._check(value.get("facts"))
            self._sound += len(line) + 1

    def _merge(self, index: int, rows: Mapping[str, Row]) -> None:
        known = self.rows.setdefault(index, {})
        for name, row in rows.items():
            known.setdefault(name, row)

    def _check(self, facts: Any) -> None:
        if facts == self._facts:
            return
        known = facts if isinstance(facts, dict) else {}
        other = [name for name in {**self._facts, **known} if known.get(name) != self._facts.get(name)]
        raise UsageError(
            f"{self._path} was made under other settings: {', '.join(self._difference(known, name) for name in other)}",
            "give another --resume file, or the settings it was made under",
        )

    def _difference(self, known: Mapping[str, Any], name: str) -> str:
        was, now = (str(facts.get(name))[:16] for facts in (known, self._facts))
        return f"{name.replace('_', ' ')} {was}, now {now}"

    def _strange(self, line: int = 1) -> UsageError:
        return UsageError(
            f"{self._path}, line {line}: not written by `{self._kind}`",
            "give a new file to --resume, or one of its own",
        )
