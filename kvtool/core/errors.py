"""Every error a user can meet: what happened, what to do about it, and the exit code a script sees."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

_COMPARED = 64  # letters of a word that known ones are compared with: comparing is quadratic
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PARTIAL = 3
EXIT_NO_STORE = 10
EXIT_LOCKED = 11
EXIT_MISFIT = 12
EXIT_DAMAGED = 13
EXIT_NO_SPACE = 14
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
# A flag of the command line; a command or a name that is quoted stays as it is.
_FLAG = re.compile(r"`[^`]*`|(?<!\w)'[^']*'|(?<![\w-])--(no-)?([a-z]+(?:-[a-z]+)*)")


class KvtoolError(Exception):
    """Base of all errors that are shown as `error: …` and `hint: …` instead of a traceback."""

    exit_code: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(KvtoolError):
    """The request itself makes no sense (a wrong flag, a missing path, an unknown chunk id)."""

    exit_code = EXIT_USAGE


class StoreNotFoundError(KvtoolError):
    exit_code = EXIT_NO_STORE


class NoDocumentsError(KvtoolError):
    def __init__(self) -> None:
        super().__init__("the store holds no documents", "run `kvtool ingest PATH` first")


class StoreLockedError(KvtoolError):
    exit_code = EXIT_LOCKED


class StoreFormatError(KvtoolError):
    """The store has another format, or the folder holds something else."""

    exit_code = EXIT_MISFIT


class ModelError(KvtoolError):
    """The model cannot be found, loaded or supported, or is not the one the store was built with."""

    exit_code = EXIT_MISFIT


class NothingFoundError(KvtoolError):
    """No chunk matches a question."""


class ContextFullError(UsageError):
    """A conversation and its next question are longer than the model's context."""


class GateError(KvtoolError):
    exit_code = EXIT_MISFIT


class UntrustedError(KvtoolError):
    """A pack or a shared store is not signed by a key that the user trusts, and has to be."""

    exit_code = EXIT_MISFIT


class DamagedError(KvtoolError):
    exit_code = EXIT_DAMAGED


class RemoteError(KvtoolError):
    """A shared store does not answer, or refuses."""


class NoSpaceError(KvtoolError):
    """The disk, the map or the size budget is full."""

    exit_code = EXIT_NO_SPACE


class BudgetError(NoSpaceError):
    """The size budget is full."""


class KvtoolWarning(UserWarning):
    """A warning that comes with an answer."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(f"{text} ({hint})" if hint else text)
        self.text = text
        self.hint = hint


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.5) -> str:
    import difflib

    words, typed = list(known), word[:_COMPARED].strip().lower()
    begun = [name for name in words if len(typed) > 1 and name.startswith(typed)]
    near = begun or difflib.get_close_matches(typed, words, n=1, cutoff=likeness)
    return f"did you mean {near[0]!r}?" if near else ""


def replace_flags(text: str) -> str:
    """Name the options of a text as requests and `kvtool.toml` do, not by their flags."""
    return _FLAG.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    if found[2] is None:
        return found[0]
    name = found[2].replace("-", "_")
    return f"{name} = false" if found[1] else name
