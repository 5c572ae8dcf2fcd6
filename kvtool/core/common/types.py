"""Types that many rooms share, the progress events of a job, and the timeline of a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Ids = tuple[int, ...]
"""Token ids."""

Warn = Callable[[str, str], None]
"""Told what a user should know although the work went on: a text, and a hint that may be empty."""


def warn_nobody(*_: Any) -> None:
    """Ignore a warning, or another event; the default where nobody listens."""


@dataclass(frozen=True, slots=True)
class Events:
    """Callbacks of a running job; by default they do nothing."""

    step: Callable[[str, int, str], None] = warn_nobody  # label, total, unit: the part before it is over
    expect: Callable[[float], None] = warn_nobody  # total units of this part; it may be an estimate
    advance: Callable[[float], None] = warn_nobody  # more units of this part that are done, whole or not
    status: Callable[[str], None] = warn_nobody  # a part of the work that has no count
    say: Callable[[str, str], None] = warn_nobody  # text, hint: what the user should know beforehand
    warn: Warn = warn_nobody
    failed: Callable[[str, str], None] = warn_nobody  # path, reason
    skipped: Callable[[str, str], None] = warn_nobody  # path, reason
    took: Callable[[str, str, int], None] = warn_nobody  # path; `added`, `changed` or `removed`; its chunks
