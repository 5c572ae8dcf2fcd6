"""Finding of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Literal

from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import KvtoolError

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's report.

    Attributes
    ----------
    subject : the thing that was checked.
    state : "failed": something that is needed does not work; "warning": it works, though worse than it could.
    message : the result.
    hint : what to do about it; never empty unless the state is "ok".
    details : lines that are shown with `-v`.
    """

    subject: str
    state: State
    message: str
    hint: str = ""
    details: tuple[str, ...] = ()


def failing(name: str) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., list[Finding]]]:
    """Make a check, a generator of findings, give a list, in which what it raises stands as a failed finding."""

    def decorate(check: Callable[..., Iterator[Finding]]) -> Callable[..., list[Finding]]:
        @wraps(check)
        def checked(*args: object) -> list[Finding]:
            found: list[Finding] = []
            try:
                found.extend(check(*args))
            except KvtoolError as error:
                hint = error.hint or "KVTOOL_DEBUG=1 shows where it comes from"
                found.append(Finding(name, "failed", scrubbed(error.message), scrubbed(hint)))
            except OSError as error:
                hint = "check the path and its permissions"
                found.append(Finding(name, "failed", f"{error.filename or name}: {error.strerror or error}", hint))
            return found

        return checked

    return decorate
