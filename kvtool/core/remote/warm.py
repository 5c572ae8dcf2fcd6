"""Prefetching of often used chunks into a shared store's local store before they are asked for again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.cache.warmth import HALF_LIFE
from kvtool.core.cache.writer import BATCH_BYTES
from kvtool.core.codec.levels import level_of
from kvtool.core.common.progress import Events
from kvtool.core.errors import RemoteError
from kvtool.core.remote.front import plan_room
from kvtool.core.remote.tier import Place, Tier
from kvtool.core.session.identity import MeasuredLosses, StoreIdentity, smallest_allowed
from kvtool.core.upkeep.inventory import turns


@dataclass(slots=True)
class WarmReport:
    """Report of a prefetch: what was fetched, and the expected gain.

    Attributes
    ----------
    path, budget : of the local store; None if it has no budget.
    asked : chunks that are asked for.
    fetched, bytes : chunks that were fetched, and their bytes.
    left : chunks that do not fit without evicting others that are used as often.
    absent : chunks of which the shared store has nothing that a question would read.
    hits_before, hits_after : share of what is asked, each chunk weighed by its use, that is stored here whole.
    damaged : what could not be fetched, and why.
    """

    url: str
    path: str
    budget: int | None
    asked: int = 0
    fetched: int = 0
    bytes: int = 0
    left: int = 0
    absent: int = 0
    hits_before: float = 0.0
    hits_after: float = 0.0
    dry_run: bool = False
    seconds: float = 0.0
    damaged: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return asdict(self)


def warm(
    store: Store,
    wanted: Mapping[bytes, float],
    *,
    level: str,
    max_loss: float,
    lock_wait: float = 0.0,
    dry_run: bool = False,
    events: Events | None = None,
) -> WarmReport:
    """Fetch chunks into the store in front of a tier, the warmest first, as far as its budget goes.

    Each comes whole, at the level that a question would read: a coarse level of more of them saves less
    (samples/results/front.md). Nothing that is as warm goes for them. What came stays: run again to resume.

    Parameters
    ----------
    wanted : how warm each chunk is by who asks; the store remembers it.
    level, max_loss : as a question has them.

    Raises
    ------
    RemoteError : the tier does not answer.
    StoreLockedError, NoSpaceError : as any writing.
    """
    if not isinstance(store.link, Tier):
        raise RemoteError("the shared store cannot be used, so nothing is fetched", "run it again when it answers")
    return _Warming(store, store.link, wanted, events or Events()).run(level, max_loss, lock_wait, dry_run)


class _Warming:
    def __init__(self, store: Store, tier: Tier, wanted: Mapping[bytes, float], events: Events) -> None:
        self._store, self._tier, self._wanted, self._events = store, tier, wanted, events
        self._report = WarmReport(tier.url, str(store.path), store.budget(), asked=len(wanted))

    def run(self, level: str, max_loss: float, lock_wait: float, dry_run: bool) -> WarmReport:
        started, report = time.perf_counter(), self._report
        report.dry_run = dry_run
        if not dry_run:
            with self._store.writer(lock_wait) as writer:
                writer.warm(self._wanted)
        places = self._places(level, max_loss)
        report.absent = len(self._wanted.keys() - places.keys())
        lacking = {chunk: missing for chunk, levels in places.items() if (missing := self._missing(chunk, levels))}
        report.hits_before = self._share(places.keys() - lacking.keys())
        kept = self._fitting(lacking)
        if dry_run:
            came = {*kept}
            report.bytes = sum(self._tier.offers(chunk)[one].size for chunk in kept for one in lacking[chunk])
        else:
            came = self._fetch([(chunk, places[chunk]) for chunk in kept], lock_wait)
        report.fetched = len(came)
        report.left = len(lacking.keys() - came - {bytes.fromhex(row["chunk"]) for row in report.damaged})
        report.hits_after = self._share((places.keys() - lacking.keys()) | came)
        report.seconds = time.perf_counter() - started
        return report

    def _places(self, level: str, max_loss: float) -> dict[bytes, list[str]]:
        """The levels of each chunk that a question needs, the coarser first, and those of the prompt's beginning."""
        identity, losses = StoreIdentity.from_manifest(self._store.manifest()), MeasuredLosses(self._store)
        read = dict.fromkeys(self._wanted, (level, max_loss))
        if identity is not None and identity.prefix:
            read[identity.prefix_id] = "auto", 0.0
        places = {}
        for chunk, (asked, most) in read.items():
            levels = self._store.levels(chunk)
            best = asked if asked in levels else None
            if asked == "auto":
                best = smallest_allowed(levels, losses.of(chunk, levels), most)
            if best is not None:
                places[chunk] = self._with_bases(chunk, best)
        return places

    def _with_bases(self, chunk: bytes, level: str) -> list[str]:
        offers, chain = self._tier.offers(chunk), [level]
        while level_of(level).nested and (base := getattr(offers.get(level), "base", None)) is not None:
            chain.insert(0, level := base)
        return chain

    def _missing(self, chunk: bytes, levels: Sequence[str]) -> list[str]:
        return [one for one in levels if not self._tier.is_here(chunk, one)]

    def _fitting(self, lacking: Mapping[bytes, Sequence[str]]) -> list[bytes]:
        """The chunks that there is room for, the warmest first; the prompt's beginning before all."""
        known = turns(self._store)
        warmth = {chunk: max(warm, known.get(chunk, 0.0)) for chunk, warm in self._wanted.items()}
        warmth |= dict.fromkeys(lacking.keys() - self._wanted.keys(), max(warmth.values(), default=0.0) + HALF_LIFE)
        sizes = {chunk: sum(self._tier.bytes_here(chunk, one) for one in levels) for chunk, levels in lacking.items()}
        kept = plan_room(self._store, sizes, known | warmth, spare=0.0).kept
        return sorted(kept, key=lambda chunk: (-warmth[chunk], chunk))

    def _share(self, here: set[bytes]) -> float:
        """Return the share of what is asked that is in `here`, each chunk weighed by its use."""
        latest = max(self._wanted.values(), default=0.0)
        weights = {chunk: 2 ** ((warm - latest) / HALF_LIFE) for chunk, warm in self._wanted.items()}
        of = sum(weight for chunk, weight in weights.items() if chunk in here)
        return of / (sum(weights.values()) or 1.0)  # in one order, so that all of it is 1

    # ---- fetching ----

    def _fetch(self, chunks: Sequence[tuple[bytes, Sequence[str]]], lock_wait: float) -> set[bytes]:
        self._events.step("chunks", len(chunks), "chunks")
        came = set[bytes]()
        with closing(self._tier.arrivals()) as arrivals:
            for batch in self._batches(chunks):
                wanted = {place: self._tier.wanted(*place) for place in batch}
                arrivals.ask([one for of_place in wanted.values() for one in of_place])
                try:
                    for place, of_place in wanted.items():
                        values = [arrivals.take(self._tier.timeout).value for _ in of_place]
                        self._keep(place, values)
                finally:
                    lost = {*batch} - self._tier.write_fetched(lock_wait, spare=0.0)
                chunks_of = {chunk for chunk, _ in batch}
                came |= chunks_of - {chunk for chunk, _ in lost}
                self._events.advance(len(chunks_of))
        return came

    def _batches(self, chunks: Sequence[tuple[bytes, Sequence[str]]]) -> Iterator[list[Place]]:
        """Chunks whole, some megabytes at a time; what another process has brought meanwhile is left out."""
        batch, size = list[Place](), 0
        for chunk, levels in chunks:
            missing = self._missing(chunk, levels)
            size += sum(self._tier.offers(chunk)[one].size for one in missing)
            batch += [(chunk, one) for one in missing]
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _keep(self, place: Place, values: Sequence[bytes | None]) -> None:
        """Hold a chunk at a level, whole or not at all."""
        if all(self._tier.keep(place, layer, value) for layer, value in enumerate(values)):
            self._report.bytes += sum(len(value or b"") for value in values)
        else:
            reason = "it is damaged or missing there"
            self._report.damaged.append({"chunk": place[0].hex(), "level": place[1], "reason": reason})
