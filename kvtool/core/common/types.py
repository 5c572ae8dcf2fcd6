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
    """Callbacks of a running job; by default they do nothing."""

    step: Callable[[str, int, str], None] = _nothing  # label, total, unit: the part before it is over
    expect: Callable[[float], None] = _nothing  # total units of this part; it may be an estimate
    advance: Callable[[float], None] = _nothing  # more units of this part that are done, whole or not
    status: Callable[[str], None] = _nothing  # a part of the work that has no count
    say: Callable[[str, str], None] = _nothing  # text, hint: what the user should know beforehand
    warn: Warn = warn_nobody
    failed: Callable[[str, str], None] = _nothing  # path, reason
    skipped: Callable[[str, str], None] = _nothing  # path, reason
    took: Callable[[str, str, int], None] = _nothing  # path, `added`, `changed` or `removed`, chunks of its documents
