"""Choose the level at which a chunk is read, and cache the profiles that records name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import NO_PROFILE, exact, known, level_of, lossy, whole
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.codec.profile import Profile


class MeasuredLosses:
    """What `compress` has measured of the lossy levels: KL of the answer, in nats a token, by what made the records.

    What cannot be read counts as never measured. Nothing is known of records that name no profile once a named
    predictor has made some: they look like those of `auto`. A level that knows no profiles is made in one way, whatever
    the profile was when it was measured.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, dict[str, float]] = {}
        self._alone: dict[str, float] = {}
        self._maker = NO_PROFILE.hex()
        with suppress(DamagedError, AttributeError, KeyError, TypeError, ValueError):
            state = store.codec_state()
            self._maker = state.get("profile") or self._maker
            measured = {
                maker: {level: float(rows[level]["kl_answer"]) for level in lossy(rows)}
                for maker, rows in losses_by_maker(state).items()
            }
            for rows in measured.values():
                self._alone |= {level: loss for level, loss in rows.items() if not level_of(level).profiled}
            if state.get("named_predictor"):
                measured.pop(NO_PROFILE.hex(), None)
            self._rows = measured

    def of(self, chunk_id: bytes, levels: Iterable[str]) -> dict[str, float]:
        """Losses of a chunk's lossy levels, each as measured with the profile that its own records name.

        A level whose records are of a profile that nothing was measured with is not among them.
        """
        measured = {level for rows in self._rows.values() for level in rows}.union(self._alone)
        found = {level: self._loss(chunk_id, level) for level in measured.intersection(levels)}
        return {level: loss for level, loss in found.items() if loss is not None}

    def _loss(self, chunk_id: bytes, level: str) -> float | None:
        if not level_of(level).profiled:
            return self._alone[level]
        return self._rows.get(self._store.made_with(chunk_id, level) or "", {}).get(level)

    def of_new(self, level: str) -> float | None:
        """Get the loss of records that are made now, with the store's current profile; None: not measured."""
        return self._alone.get(level, self._rows.get(self._maker, {}).get(level))

    def at_most(self) -> dict[str, float]:
        """The most that any stored chunk loses at a level, of levels whose chunks' losses are all known."""
        lost: dict[str, float] = {}
        for chunk_id in self._store.chunk_ids() if self._rows or self._alone else ():
            stored = lossy(self._store.levels(chunk_id))
            own = self.of(chunk_id, stored)
            for level in stored:
                lost[level] = max(lost.get(level, 0.0), own.get(level, math.inf))
        return {level: lost[level] for level in lossy(lost) if lost[level] < math.inf}


def losses_by_maker(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a store's codec state says of each level, by the profile that made the records: `NO_PROFILE` for none.

    Older stores kept one row a level: that of the profile in use.
    """
    rows = dict(state.get("losses") or {})
    old = {level: rows.pop(level) for level in lossy(rows)}
    if old:
        maker = state.get("profile") or NO_PROFILE.hex()
        rows[maker] = rows.get(maker, {}) | old
    return {maker: dict(levels) for maker, levels in rows.items() if levels}


def allowed_levels(levels: Sequence[str], losses: Mapping[str, float], max_loss: float) -> list[str]:
    """Choose those of a chunk's levels that lose nothing, or measurably little enough; the finest first."""
    return [level for level in known(levels) if level_of(level).lossless or losses.get(level, math.inf) <= max_loss]


def smallest_allowed(levels: Sequence[str], losses: Mapping[str, float], max_loss: float) -> str | None:
    """The smallest of a chunk's levels whose measured loss is allowed; where none is, the one that loses least."""
    exactly = min((level_of(level).bits for level in exact(levels)), default=math.inf)
    allowed = [level for level in lossy(allowed_levels(levels, losses, max_loss)) if level_of(level).bits < exactly]
    return next(iter((*reversed(allowed), *reversed(exact(levels)), *_least_lossy(levels, losses))), None)


def _least_lossy(levels: Sequence[str], losses: Mapping[str, float]) -> list[str]:
    """The finest of a chunk's lossy levels that store all rows, or one that leaves rows out where less is known to be
    lost with it; the better one first."""
    finest = lossy(whole(levels))[:1]
    sparse = [level for level in lossy(levels) if level_of(level).share < 100]
    unknown = dict.fromkeys(finest, 0.0)
    return sorted([*finest, *sparse], key=lambda level: losses.get(level, unknown.get(level, math.inf)))


class ProfileCache:
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
        """The profile that new records are made with; None before the first `compress`.

        Raises
        ------
        DamagedError : it is lost.
        """
        digest = self._store.codec_state().get("profile", "")
        return self(bytes.fromhex(digest)) if digest else None
