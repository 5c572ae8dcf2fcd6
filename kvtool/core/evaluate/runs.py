"""Name of a run: a fusion mode, its changed parameters, and how much it recomputes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def run_name(mode: str, changes: Iterable[tuple[str, Any]], amount: float | None) -> str:
    """A run as a user writes it, such as `union+shift=no:0.15`.

    Parameters
    ----------
    changes : options of the mode and their values. `amount`: what its own knob says; None: it has none.
    """
    variant = "+".join([mode, *(f"{name}={_text(value)}" for name, value in changes)])
    return variant if amount is None else f"{variant}:{amount:.12g}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
