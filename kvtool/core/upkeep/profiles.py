"""Find codec profiles that nothing in a store names any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import profiled
from kvtool.core.session.identity import losses_by_maker

_PROFILE_BYTES = 16  # of a codec profile's digest; those of learned lead-ins of earlier versions are longer


def without_profile(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the codec levels without its current profile; measurements made with the profile are kept."""
    return {**state, "profile": "", "losses": losses_by_maker(state)}


def old_profiles(store: Store) -> list[bytes]:
    """Return the digests of profiles that no record was made with, and that no new record would be made with.

    Raises
    ------
    DamagedError : what is in use cannot be read.
    """
    unread = [digest for digest in store.profile_digests() if len(digest) != _PROFILE_BYTES]
    current = str(store.codec_state().get("profile", ""))
    candidates = [digest for digest in store.profile_digests() if digest.hex() != current and digest not in unread]
    if not candidates:
        return unread
    named = {store.made_with(chunk, level) for chunk in store.chunk_ids() for level in profiled(store.levels(chunk))}
    if None in named:  # a record whose maker cannot be told: verify tells of it
        return unread
    return unread + [digest for digest in candidates if digest.hex() not in named]
