"""Find the set of records that a pass can need at each layer: through a window no row sees what is further back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.kernels.attention.dispatch import first_read
from kvtool.core.model.prompt_cache import PromptCache


@dataclass(frozen=True, slots=True)
class ReadSet:
    """The segments that are read, layer by layer.

    Attributes
    ----------
    read : of each layer.
    skipped : of each layer, those that a model without windows would have read.
    unwritten : of each layer, spans of rows that nothing is put into and attention may still pass over.
    """

    read: tuple[tuple[Segment, ...], ...]
    skipped: tuple[tuple[Segment, ...], ...]
    unwritten: tuple[tuple[slice, ...], ...]

    @classmethod
    def of(cls, plan: Plan, selector: Selector, windows: Sequence[int | None], device: str = "cpu") -> ReadSet:
        """What a selector's pass over a plan needs, whichever rows it comes to choose on the way.

        Parameters
        ----------
        windows : how many positions a row sees at each layer that has records; None: all before it.
        """
        layers = len(windows)
        # What is there whole although its records are not is computed at every layer.
        needed = tuple(one for one in selector.reads(plan, layers) if one.kept == one.source.kept)
        sizes = () if selector.looked_into else {*windows}
        seen = {size: _Seen.through(size, plan, selector, layers) for size in sizes if size is not None}
        read: list[tuple[Segment, ...]] = []
        skipped: list[tuple[Segment, ...]] = []
        unwritten: list[tuple[slice, ...]] = []
        for window in windows:
            through = None if window is None else seen.get(window)
            if through is None:
                read.append(needed)
                skipped.append(())
                unwritten.append(())
                continue
            shown = {one.start for one in needed if through.shows(one)}
            read.append(tuple(one for one in needed if one.start in shown))
            skipped.append(tuple(one for one in needed if one.start not in shown))
            unwritten.append(tuple(through.passed(one, device) for one in skipped[-1]))
        return cls(tuple(read), tuple(skipped), tuple(unwritten))

    @classmethod
    def whole(cls, plan: Plan, layers: int) -> ReadSet:
        """All that is cached, at every layer."""
        return cls((tuple(plan.cached),) * layers, ((),) * layers, ((),) * layers)

    def __add__(self, later: ReadSet) -> ReadSet:
        """Both, of two rounds over one prompt."""
        sides = (self.read, later.read), (self.skipped, later.skipped), (self.unwritten, later.unwritten)
        read, skipped, unwritten = (tuple(a + b for a, b in zip(*side, strict=True)) for side in sides)
        return ReadSet(read, skipped, unwritten)

    def to_json(self) -> dict[str, int]:
        """How many records were read, and how many no computed row could see."""
        return {"records_read": sum(map(len, self.read)), "records_spared": sum(map(len, self.skipped))}

    def bytes_skipped(self, sizes: Callable[[Segment], Sequence[int]]) -> int:
        """What the records would have taken that no computed row could see.

        Parameters
        ----------
        sizes : bytes of a segment's records, by layer; empty: they would have taken nothing.
        """
        skipped: dict[int, tuple[Segment, list[int]]] = {}
        for layer, segments in enumerate(self.skipped):
            for segment in segments:
                skipped.setdefault(segment.start, (segment, []))[1].append(layer)
        total = 0
        for segment, layers in skipped.values():
            of_segment = sizes(segment)
            total += sum(of_segment[layer] for layer in layers if layer < len(of_segment))
        return total

    def shares(self, plan: Plan) -> list[float]:
        """Which share of the layers reads each segment of a plan."""
        starts = [{one.start for one in read} for read in self.read]
        return [sum(segment.start in read for read in starts) / len(starts) for segment in plan.segments]

    def clear(self, cache: PromptCache) -> None:
        """Zero the rows that are never loaded: 0 × NaN would poison masked attention."""
        for buffer, spans in zip(cache.buffers, self.unwritten, strict=True):
            for span in spans:
                buffer.keys[:, :, span].zero_()
                buffer.values[:, :, span].zero_()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rows that a pass may compute see through a window.

    Attributes
    ----------
    places : int64 `[length + 1]`, how many places before each are seen.
    first : the first one that is.
    """

    places: torch.Tensor
    first: int

    @classmethod
    def through(cls, window: int, plan: Plan, selector: Selector, layers: int) -> _Seen:
        rows = _computed(plan, selector, layers).nonzero()[:, 0].tolist()
        positions = plan.positions.tolist()
        seen = torch.zeros(plan.length, dtype=torch.bool)
        behind = 0
        for row in rows:
            begin = bisect_left(positions, positions[row] - window + 1)
            seen[max(begin, behind) : row + 1] = True
            behind = row + 1
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), seen.cumsum(0)])
        return cls(counts, int(seen.nonzero()[0]) if bool(seen.any()) else plan.length)

    def shows(self, segment: Segment) -> bool:
        """Whether any of a segment's rows is seen."""
        return bool(self.places[segment.stop] > self.places[segment.start])

    def passed(self, segment: Segment, device: str) -> slice:
        """Return which of its rows attention may read, unseen."""
        begin = first_read(self.first, device)
        return slice(max(segment.start, begin), max(segment.stop, begin))


def _computed(plan: Plan, selector: Selector, layers: int) -> torch.Tensor:
    """Bool `[length]`: rows that a pass may compute."""
    if selector.asked(plan, layers) or selector.narrowing(plan, layers):
        return plan.mask("hit", "miss", "fresh")
    return selector.rows(plan) & plan.mask("hit", "exact") | plan.mask("miss", "fresh")
