"""Types that many rooms share, and the progress events of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Ids = tuple[int, ...]
"""Token ids."""

Warn = Callable[[str, str], None]
"""Told what a user should know although the work went on: a text, and a hint that may be empty."""


def warn_nobody(text: str, hint: str) -> None:
    """Ignore a warning; the default where nobody listens."""


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Events:
    """Callbacks of a running job; by default they do nothing.

    Attributes
    ----------
    step : (label, total, unit): a part of the job begins, of so many units; the part before it is over.
    expect : (total): so many units are expected of this part by now; it may be an estimate.
    advance : (count): so many more units of this part are done, whole or not.
    status : (text): a part of the work that has no count.
    say : (text, hint): something that the user should know beforehand, as how long it takes.
    failed, skipped : (path, reason).
    took : (path, what, chunks): a file's documents were `added`, `changed` or `removed`.
    """

    step: Callable[[str, int, str], None] = _nothing
    expect: Callable[[float], None] = _nothing
    advance: Callable[[float], None] = _nothing
    status: Callable[[str], None] = _nothing
    say: Callable[[str, str], None] = _nothing
    warn: Warn = warn_nobody
    failed: Callable[[str, str], None] = _nothing
    skipped: Callable[[str, str], None] = _nothing
    took: Callable[[str, str, int], None] = _nothing
