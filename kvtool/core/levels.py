"""Which level of a chunk is read, and the profiles that records name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import LOSSY
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.codec.profile import Profile


def recorded_losses(store: Store) -> dict[str, float]:
    """KL of the answer, in nats a token, that `compress` has measured of each lossy level."""
    try:
        losses = store.codec_state().get("losses", {})
        return {level: float(losses[level]["kl_answer"]) for level in LOSSY if level in losses}
    except (DamagedError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def smallest_allowed(levels: Sequence[str], losses: Mapping[str, float], max_loss: float) -> str | None:
    """The smallest of a chunk's levels whose recorded loss is allowed; where none is, the one that loses least."""
    allowed = [level for level in reversed(LOSSY) if level in levels and losses.get(level, max_loss + 1) <= max_loss]
    kept = [level for level in ("lossless", "raw", *LOSSY) if level in levels]
    return next(iter((*allowed, *kept)), None)


class ProfileShelf:
    """A store's codec profiles by digest; each is read and checked once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[bytes, Profile] = {}

    def __call__(self, digest: bytes) -> Profile:
        """The profile; raises DamagedError where it is missing or damaged."""
        from kvtool.core.codec.profile import Profile, digest_of

        found = self._read.get(digest)
        if found is None:
            data = self._store.profile(digest)
            if data is None or digest_of(data) != digest:
                raise DamagedError(
                    f"the codec profile {digest.hex()} is not in the store", "make it anew with `kvtool compress --fit`"
                )
            found = self._read[digest] = Profile.from_bytes(data)
        return found

    def current(self) -> Profile | None:
        """The profile that new records are made with; None before the first `compress --fit`.

        Raises
        ------
        DamagedError : it is lost.
        """
        digest = self._store.codec_state().get("profile", "")
        return self(bytes.fromhex(digest)) if digest else None
