"""Join what two stores know of the codec levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.core.codec.levels import NO_PROFILE
from kvtool.core.session.identity import losses_by_maker

State = Mapping[str, Any]


def join_codec(mine: State, theirs: State) -> dict[str, Any]:
    """A store's own codec state with what another one has measured beside it.

    New records go on being made with the store's own profile. Losses are kept for each profile that records may name;
    of a level that both have measured with one profile its own counts.
    """
    if not mine or not theirs:
        return dict(mine or theirs)
    ours, other = losses_by_maker(mine), losses_by_maker(theirs)
    rows = {maker: other.get(maker, {}) | ours.get(maker, {}) for maker in {**other, **ours}}
    profile = mine.get("profile") or theirs.get("profile") or ""
    return {**theirs, **mine, "profile": profile, "losses": _written(rows, profile)}


def _written(rows: dict[str, Any], profile: str) -> dict[str, Any]:
    """The older form, which every version reads, where it can hold them all."""
    maker = profile or NO_PROFILE.hex()
    return dict(rows[maker]) if rows.keys() == {maker} else rows
