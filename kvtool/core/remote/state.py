"""What two stores know of the codec levels and of the learned lead-in, brought together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.core.codec.levels import LOSSY

State = Mapping[str, Any]
_NO_PROFILE = "00" * 16  # what a record names that was made without one


def join_codec(mine: State, theirs: State) -> dict[str, Any]:
    """A store's own codec state with what another one has measured beside it.

    New records go on being made with the store's own profile. Losses are kept for each profile that records may name;
    of a level that both have measured with one profile its own counts.
    """
    if not mine or not theirs:
        return dict(mine or theirs)
    own, other = _by_maker(mine), _by_maker(theirs)
    rows = {maker: other.get(maker, {}) | own.get(maker, {}) for maker in {**other, **own}}
    profile = mine.get("profile") or theirs.get("profile") or ""
    return {**theirs, **mine, "profile": profile, "losses": _written(rows, profile)}


def _by_maker(state: State) -> dict[str, Any]:
    """Losses by level, by the profile that they were measured with; older stores kept those of one profile only."""
    rows = dict(state.get("losses") or {})
    old = {level: rows.pop(level) for level in LOSSY if level in rows}
    if old:
        maker = state.get("profile") or _NO_PROFILE
        rows[maker] = rows.get(maker, {}) | old
    return {maker: dict(levels) for maker, levels in rows.items() if levels}


def _written(rows: dict[str, Any], profile: str) -> dict[str, Any]:
    """The older form, which every version reads, where it can hold them all."""
    maker = profile or _NO_PROFILE
    return dict(rows[maker]) if rows.keys() == {maker} else rows
