"""Chunks of a model that keeps states, computed apart and put together: an approximation, off unless asked for by name.

Layers that attend are fused as elsewhere: keys are moved to their places, nothing else changes. A recurrent state is
composed: what a chunk carries of the state before it, and what it adds itself, both of the layer's inputs as they were
when the chunk was computed alone (model/alone.py). So it is with HYPIC (arXiv 2607.01299); LinearKV (arXiv 2608.11231)
takes the last chunk's state as it is. The state is exact where nothing before a chunk would have changed its inputs: of
a chunk behind its own lead-in, and of layers whose inputs are the tokens alone.

Rows of a chunk can be computed again from its first on (`epic`), since the state before them is known, and the state
before rows in its middle is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.core.codec.levels import RAW
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.chain import DAMAGED, pass_of
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.reach import Reach
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shifted
from kvtool.core.fusion.stretch import KEYS, VALUES, Found, ReadPart, fitting, named_states, take_beginning
from kvtool.core.kernels.rope import Table
from kvtool.core.model.alone import follow
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.states import StateCache, StateLayer, States
from kvtool.core.records.parts import decode_part


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored of a prompt's segments, question excluded.

    Attributes
    ----------
    found : of the first the stretch of the prompt's own beginning, of the others what each chunk gives by itself.
    behind : token ids that chunks were computed behind.
    """

    found: Found
    behind: Ids


def fuse_apart(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    stored: Stored,
    read: ReadPart,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> Fused:
    """Put a prompt together, and compute its holes, the rows that a mode computes again, and the question.

    A part that turns out damaged gives its chunk up: the pass starts again with that computed in place.

    Parameters
    ----------
    selector : names leading rows of chunks, or none.
    """
    started = time.perf_counter()
    while True:
        cache = decoder.new_cache(plan.length + reserve)
        assert isinstance(cache, StateCache)
        plan = _as_found(plan, stored)
        run = _Pass(decoder, cache, plan, selector, stored.found, read)
        damaged = run.context()
        if damaged is None:
            break
        stored = replace(stored, found=stored.found.without(damaged))
        plan = _with_reason(plan, damaged)
    logits = run.compute(plan.segments[-1].ids, plan.segments[-1].start)
    cache.mark()
    total = add_span(timeline, "put together", started)
    return _fused(decoder, plan, selector, run, logits, total)


class _Pass:
    """One way through a prompt, segment by segment.

    Attributes
    ----------
    recomputed : bool `[length]`: cached rows that are computed again.
    """

    def __init__(
        self, decoder: Decoder, cache: StateCache, plan: Plan, selector: Selector, found: Found, read: ReadPart
    ) -> None:
        self.cache, self.bytes_read, self.read_s = cache, 0, 0.0
        self.recomputed = selector.rows(plan) & plan.mask("hit")
        self._decoder, self._plan, self._found, self._read = decoder, plan, found, read
        self._table: Table = decoder.rotary.table(torch.arange(plan.length, device=decoder.device))

    def context(self) -> int | None:
        """Take or compute all but the question; the number of a segment of which something is damaged, or None."""
        for number, segment in enumerate(self._plan.segments[:-1]):
            if not segment.cached:
                self.compute(segment.ids, segment.start)
                continue
            try:
                self._take(number, segment)
            except DamagedError:
                return number
        return None

    def compute(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """Compute rows behind the state as it is; logits of the last, float32 `[vocabulary]`."""
        return pass_of(self._decoder, ids, start, self.cache) if ids else torch.empty(0, dtype=torch.float32)

    def _take(self, number: int, segment: Segment) -> None:
        again = int(self.recomputed[segment.start : segment.stop].sum())
        if again == len(segment.ids):  # nothing of it is needed
            self.compute(segment.ids, segment.start)
            return
        if not number:
            self.bytes_read += take_beginning(self._decoder, self.cache, self._found, segment, self._read)
            return
        before = self._states()
        rows, states = self._read_all(number, segment)
        self._place(rows, segment)
        self.compute(segment.ids[:again], segment.start)
        self.cache.set_length(segment.stop)
        for layer, own in states.items():
            self.cache.buffers[layer].take(follow(before[layer], own, len(segment.ids)))

    def _states(self) -> dict[int, States]:
        """Copies of all states as they are now."""
        return {
            number: {key: tensor.clone() for key, tensor in layer.states().items()}
            for number, layer in enumerate(self.cache.buffers)
            if isinstance(layer, StateLayer)
        }

    def _read_all(self, number: int, segment: Segment) -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, States]]:
        """All that is stored of a chunk, before anything of it is put anywhere."""
        info, chunk, started = self._found.infos[number], self._found.ids[number], time.perf_counter()
        buffers = self.cache.buffers
        rows = [layer for layer, buffer in enumerate(buffers) if isinstance(buffer, BufferLayer)]
        states = [layer for layer, buffer in enumerate(buffers) if isinstance(buffer, StateLayer)]
        if info is None or [*info.rows] != rows or [*info.states] != states or info.tokens != len(segment.ids):
            raise DamagedError("a chunk of another model")
        read = {place: self._read(chunk, place) for place in info.places}
        self.bytes_read += sum(payload.nbytes for payload in read.values())
        parts = {place: decode_part(payload) for place, payload in read.items()}
        self.read_s += time.perf_counter() - started
        return {layer: parts["rows", layer] for layer in rows}, {
            layer: named_states(parts["state", layer], self._decoder, layer, alone=True) for layer in states
        }

    def _place(self, rows: dict[int, dict[str, torch.Tensor]], segment: Segment) -> None:
        span = slice(segment.start, segment.stop)
        for own, (layer, sides) in enumerate(rows.items()):
            buffer = self.cache.buffers[layer]
            keys, values = buffer.keys[:, :, span], buffer.values[:, :, span]
            found = fitting(sides.get(KEYS), keys).to(self._decoder.device)
            self._decoder.rotary.rotate_into(keys, found, self._table[span], own)
            values.copy_(fitting(sides.get(VALUES), values))


def _as_found(plan: Plan, stored: Stored) -> Plan:
    """The plan with what is stored in place of what is not: exact where the lead-in is what stands before it."""
    context: list[Segment] = []
    before: Ids = ()
    for number, segment in enumerate(plan.segments[:-1]):
        info = stored.found.infos[number]
        if info is None or not info.states:
            context.append(replace(segment, status="miss", reason=segment.reason or "not stored"))
        else:
            exact = not number or before == stored.behind
            source = replace(segment.source, level=RAW)
            context.append(replace(segment, status="exact" if exact else "hit", source=source, reason=""))
        before += segment.ids
    return Plan((*context, plan.segments[-1]))


def _with_reason(plan: Plan, number: int) -> Plan:
    segments = [replace(one, reason=DAMAGED) if at == number else one for at, one in enumerate(plan.segments)]
    return Plan(tuple(segments))


def _fused(decoder: Decoder, plan: Plan, selector: Selector, run: _Pass, logits: torch.Tensor, total: float) -> Fused:
    cached, again = int(plan.mask("hit", "exact").sum()), int(run.recomputed.sum())
    fresh = plan.length - cached
    none = torch.zeros(plan.length, dtype=torch.bool)
    return Fused(
        logits=logits,
        cache=run.cache,
        plan=plan,
        tokens=TokenCounts(plan.length, cached - again, again, fresh, (fresh + again,) * len(decoder.layers)),
        timing=FuseTiming(run.read_s * 1e3, 0.0, 0.0, 0.0, 0.0, 0.0, (total - run.read_s) * 1e3, 0.0),
        bytes_read=run.bytes_read,
        reach=Reach.whole(plan, len(decoder.layers)),
        recomputed=run.recomputed,
        reasons=selector.reasons(plan, run.recomputed),
        shifted=Shifted(none, ()),
    )
