"""Codec profiles and learned lead-ins that nothing in a store names any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.core.cache.identity import ids_digest, learned_digest
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import profiled
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.levels import losses_by_maker

_PROFILE_BYTES = 16  # of a codec profile's digest; a learned lead-in's is longer


def without_profile(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a store knows of the codec levels without its current profile; what was measured with it stays known."""
    return {**state, "profile": "", "losses": losses_by_maker(state)}


def old_profiles(store: Store) -> list[bytes]:
    """Digests of what may go: no record is made with it, and no new one would be.

    Raises
    ------
    DamagedError : what is in use cannot be read.
    """
    codecs = [digest for digest in store.profile_digests() if len(digest) == _PROFILE_BYTES]
    learned = [digest for digest in store.profile_digests() if len(digest) != _PROFILE_BYTES]
    return _old_codecs(store, codecs) + _old_lead_ins(store, learned)


def _old_codecs(store: Store, digests: list[bytes]) -> list[bytes]:
    current = str(store.codec_state().get("profile", ""))
    candidates = [digest for digest in digests if digest.hex() != current]
    if not candidates:
        return []
    named = {store.made_with(chunk, level) for chunk in store.chunk_ids() for level in profiled(store.levels(chunk))}
    if None in named:  # a record whose maker cannot be told: verify tells of it
        return []
    return [digest for digest in candidates if digest.hex() not in named]


def _old_lead_ins(store: Store, digests: list[bytes]) -> list[bytes]:
    identity = StoreIdentity.from_manifest(store.manifest())
    if identity is None:
        return []
    current = {str(store.lead_in_state().get("digest", "")), identity.lead_in.rows}
    candidates = [digest for digest in digests if digest.hex() not in current]
    if not candidates:
        return []
    behind = {_lead_in(store, chunk) for chunk in store.chunk_ids()}
    ids = ids_digest(identity.lead_in.ids)
    return [digest for digest in candidates if learned_digest(ids, digest) not in behind]


def _lead_in(store: Store, chunk: bytes) -> bytes:
    try:
        info = store.chunk_info(chunk)
    except DamagedError:
        return b""
    return info.lead_in if info is not None else b""
