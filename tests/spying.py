"""Calls that a test watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def calls_of(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = lambda *given, **more: given
) -> list[Any]:
    """Pass the calls of a function on, and collect what `note` makes of the arguments of each."""
    noted: list[Any] = []
    call = getattr(owner, name)

    def passed_on(*given: Any, **more: Any) -> Any:
        noted.append(note(*given, **more))
        return call(*given, **more)

    patch.setattr(owner, name, passed_on)
    return noted
