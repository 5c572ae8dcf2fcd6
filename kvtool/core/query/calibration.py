"""How sure an answer has to be: measured by `inspect quality --defer`, kept beside the store by model and mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.query.defer import DEFAULT_THRESHOLD, PROBED, Threshold

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

FORMAT = 1


def threshold_for(store: Store, fingerprint: str, mode: str, asked: float | None) -> Threshold:
    """What was asked for, else what was calibrated for this model and mode, else the default."""
    if asked is not None:
        return Threshold(asked, "asked for")
    try:
        value = float(_modes(store, fingerprint)[mode]["threshold"])
    except (KeyError, TypeError, ValueError):
        return Threshold(DEFAULT_THRESHOLD, "default")
    return Threshold(value, "calibrated") if math.isfinite(value) else Threshold(DEFAULT_THRESHOLD, "default")


def keep_threshold(store: Store, fingerprint: str, mode: str, value: float, facts: Mapping[str, Any]) -> bool:
    """Put a mode's threshold; those of other modes stay. False: the store cannot be written.

    Parameters
    ----------
    facts : what it was measured on; for people.
    """
    modes = _modes(store, fingerprint) | {mode: {"threshold": value, **facts}}
    return write_side(store, _name(fingerprint), {"format": FORMAT, "probed": PROBED, "modes": modes})


def _modes(store: Store, fingerprint: str) -> dict[str, Any]:
    """What was kept, by mode; nothing where that cannot be read, or was measured in another way."""
    modes = read_side(store, _name(fingerprint), format=FORMAT, probed=PROBED).get("modes")
    return modes if isinstance(modes, dict) else {}


def _name(fingerprint: str) -> str:
    return f"defer/{fingerprint[:16]}.json"
