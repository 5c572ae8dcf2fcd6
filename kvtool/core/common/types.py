"""Types that many rooms share."""

from __future__ import annotations

from collections.abc import Callable

Ids = tuple[int, ...]
"""Token ids."""

Warn = Callable[[str, str], None]
"""Told what a user should know although the work went on: a text, and a hint that may be empty."""


def warn_nobody(text: str, hint: str) -> None:
    """Ignore a warning; the default where nobody listens."""
