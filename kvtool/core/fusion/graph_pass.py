"""Pass over a prompt that lies on a GPU whole: nothing is waited for, so it is captured as a graph, and replayed.

Launching the operations of a pass then takes longer than they do (samples/results/gpu.md). Rows are padded to a few
sizes: the first one is there several times, which computes and writes the same again. A graph is of fixed memory: it
serves every prompt whose cache has these addresses, as the caches of successive prompts of about one length tend to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling, QuestionWatch
from kvtool.core.fusion.shift import Probes, Shift, ShiftSteps
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.captured import CapturedWork, StaticRows, memory_of
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.passes import OnLayer
from kvtool.core.model.prompt_cache import PromptCache

# More rows keep a GPU busy for longer than launching takes, and padding them would cost more than it saves.
_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CHUNKS = (8, 32, 128)

T = TypeVar("T")


class GraphPass:
    """The passes over a prompt whose reused rows are in its cache, on a GPU; rows after it have numbers (zeros)."""

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._capacity = cache.buffers[0].keys.shape[2]

    @classmethod
    def of(cls, decoder: Decoder, plan: Plan, cache: PromptCache, loader: Loader) -> GraphPass | None:
        """Returns None if layers are still to be loaded, or some tokens of the prompt have no rows."""
        if not decoder.forward.captures or not loader.is_placed or plan.dropped:
            return None
        return cls(decoder, cache)

    @torch.inference_mode()
    def attention(
        self, ids: list[int], rows: QueryRows, count: int, layers: range, pooling: Pooling, ends: bool
    ) -> torch.Tensor | None:
        """Compute rows, and measure the attention of the last `count`, float32 `[capacity]`, overwritten by the next
        pass; None: too many rows. `ends`: nothing after the last of the layers is needed."""
        size = _padded(len(rows), _ROWS)
        if size is None:
            return None
        key = "question", size, layers, pooling, ends
        static = self._known(key, lambda: _StaticRows(self._decoder, size))
        static.give(ids, rows, count)
        watched = 1 if pooling == "last" else size

        def work() -> torch.Tensor:
            seen, counted = StaticRows(static.places, self._capacity), static.counted[size - watched :]
            watch = QuestionWatch(seen, watched, layers, self._capacity, pooling, ends, counted)
            with self._cache.filled(self._capacity):
                self._decoder.fill_cache(static.ids, seen, self._cache, on_layer=watch)
            return watch.mean

        attention: torch.Tensor = static.captured.run(work)
        return attention

    @torch.inference_mode()
    def logits(self, ids: list[int], rows: QueryRows, shift: Shift) -> torch.Tensor | None:
        """Compute rows and shift reused ones; return the logits of the last row, float32 `[vocabulary]`. None: there
        are too many rows or chunks, or this is a prefill."""
        probes = shift.probes
        counts = (0, 0) if probes is None else (len(probes.rows), len(probes.spans))
        sizes = _padded(len(rows), _ROWS), _padded(counts[0], (0, *_ROWS)), _padded(counts[1], (0, *_CHUNKS))
        if None in sizes or rows.dense:
            return None
        static = self._known(("fusion", *sizes), lambda: _StaticShift(self._decoder, self._capacity, *sizes))  # type: ignore[arg-type]
        static.give(ids, rows)
        if probes is not None:
            static.give_probes(probes)
        logits, changes, offsets = static.captured.run(lambda: self._fused(static))
        if probes is not None:
            shift.set_done(changes.clone(), offsets[:, : counts[1]].clone())
        last: torch.Tensor = logits.clone()
        return last

    def _fused(self, static: _StaticShift) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shifting = OnLayer()
        cache, rows = self._cache, StaticRows(static.places, self._capacity)
        if len(static.probes):
            table = self._decoder.rotary.table(torch.arange(self._capacity, device=self._decoder.device))
            given = static.probes, static.weights, static.chunks, static.factors
            shifting = _Shifting(ShiftSteps(self._decoder.rotary, cache, table, *given))
        with cache.filled(self._capacity):
            logits = self._decoder.compute(static.ids, rows, cache, on_layer=shifting)[-1]
        squares = shifting.squares if isinstance(shifting, _Shifting) else []
        changes, offsets = map(torch.stack, zip(*squares, strict=True)) if squares else (logits, logits)
        return logits, changes, offsets

    def _known(self, kind: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        addresses = tuple(side.data_ptr() for side in memory_of(self._cache))
        return self._decoder.captured.get((*kind, self._capacity, addresses), make)


class _Shifting(OnLayer):
    """Shifts reused rows at each layer; `squares` as of `ShiftSteps.add`."""

    def __init__(self, steps: ShiftSteps) -> None:
        self._steps = steps
        self.squares: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_write(self, layer: int, rows: int) -> None:
        self._steps.keep(layer)

    def written(self, layer: int) -> None:
        self.squares.append(self._steps.add(layer))


class _StaticRows:
    """Rows at fixed addresses: `ids`, `places` int64 `[rows]`; `counted` float32, 1 if asked for their attention."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.captured = CapturedWork[Any](decoder.device, decoder.captured)
        self._checked = decoder.device_ids
        self.ids, self.places = (torch.zeros(rows, dtype=torch.int64, device=decoder.device) for _ in range(2))
        self.counted = torch.zeros(rows, dtype=torch.float32, device=decoder.device)

    def give(self, ids: list[int], rows: QueryRows, count: int = 0) -> None:
        """Set the rows, of which the last `count` are asked; the first one fills the missing ones."""
        more = len(self.ids) - len(rows)
        self.ids.copy_(self._checked([*ids[:1] * more, *ids]))
        self.places.copy_(torch.tensor(rows.order[:1] * more + rows.order), non_blocking=True)
        self.counted[: len(self.ids) - count].fill_(0.0)
        self.counted[len(self.ids) - count :].fill_(1.0)


class _StaticShift(_StaticRows):
    def __init__(self, decoder: Decoder, capacity: int, rows: int, probes: int, chunks: int) -> None:
        super().__init__(decoder, rows)
        self.probes = torch.zeros(probes, dtype=torch.int64, device=decoder.device)
        self.weights = torch.zeros((chunks, probes), dtype=torch.float32, device=decoder.device)
        self.chunks = torch.zeros(capacity, dtype=torch.int64, device=decoder.device)
        self.factors = torch.zeros(capacity, dtype=torch.float32, device=decoder.device)

    def give_probes(self, given: Probes) -> None:
        """Set what is shifted, by how much; a row that stays fills the missing probes."""
        chunks, probes = len(given.spans), len(given.rows)
        self.probes.fill_(int(given.shifted[0]))
        self.probes[:probes].copy_(given.rows)
        self.weights[:chunks, :probes].copy_(given.weights, non_blocking=True)
        self.chunks[: len(given.factors)].copy_(given.chunks, non_blocking=True)
        self.factors.zero_()
        self.factors[: len(given.factors)].copy_(given.factors)


def _padded(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)
