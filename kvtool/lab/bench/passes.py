"""One prompt answered up to its first token, in every mode, timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import Fused, FuseTiming, fuse
from kvtool.core.fusion.selectors import selector_for
from kvtool.core.fusion.source import ChunkCache, KVSource, StoreSource
from kvtool.core.session.identity import ProfileCache
from kvtool.lab.bench.flops import Work, full_work, fused_work
from kvtool.lab.bench.limits import synchronize
from kvtool.lab.bench.memory import peak_memory
from kvtool.lab.bench.prompts import BenchPrompt

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Segment
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.query.options import QueryOptions

PLAIN = "transformers sdpa"  # beside the names of modes
INCLUDES = (
    "from the question's ids to the first token's id (argmax): chunk descriptions looked up, prompt laid out, records "
    "read (warm page cache), checked, decoded, uploaded, rotated, rows selected and computed, LM head of one row; not "
    "in it: retrieval, tokenising, loading of the model and of the codec's profile"
)
PLAIN_INCLUDES = "one call of the model on the same ids with sdpa attention, a cache and the logits of the last row"


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed pass, milliseconds; `plan_ms` is a part of `ttft_ms`, `cpu_ms` the calling thread's processor time."""

    ttft_ms: float
    plan_ms: float = 0.0
    timing: FuseTiming | None = None
    cpu_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a mode does to a prompt, the same in every pass.

    Attributes
    ----------
    passes : rows and keys, layer by layer.
    rows : computed at each layer of the main pass.
    peak_bytes : memory on top of the model, the prompt's cache included; None where it cannot be told.
    held_bytes : the same of a pass whose chunks are held in memory already, so that nothing is read or decoded.
    records_read, records_spared : of all layers, and those that no computed row sees through its window;
        `bytes_spared`: what these would have taken.
    """

    passes: tuple[Work, ...]
    rows: tuple[int, ...]
    bytes_read: int
    peak_bytes: int | None
    held_bytes: int | None
    records_read: int = 0
    records_spared: int = 0
    bytes_spared: int = 0


class Answerer:
    """Answers prompts from one store; profiles are read once, as a session does."""

    def __init__(self, decoder: Decoder, store: Store, options: QueryOptions) -> None:
        self.decoder = decoder
        self._store, self._options = store, options
        self._profiles = ProfileCache(store)

    def sample(self, prompt: BenchPrompt, mode: str, shift: bool = True) -> Sample:
        """Time one pass; without `shift` none of its reused rows are shifted."""
        return self._plain(prompt) if mode == PLAIN else self._fused(prompt, mode, shift=shift)[0]

    def facts(self, prompt: BenchPrompt, mode: str) -> Facts:
        """One pass that is not timed."""
        device, windows = self.decoder.device, self.decoder.windows
        if mode == PLAIN:
            with peak_memory(device) as peak:
                self._plain(prompt)
            rows = (prompt.length,) * len(windows)
            return Facts((full_work(prompt.length, windows),), rows, 0, peak.bytes, peak.bytes)
        with peak_memory(device) as peak:
            fused = self._fused(prompt, mode)[1]
        _check_whole(fused)
        passes = tuple(fused_work(fused, selector_for(self._options, mode), windows))
        rows, bytes_read, records = fused.tokens.rows, fused.bytes_read, fused.read_set.to_json()
        spared = fused.read_set.bytes_skipped(self._sizes)
        del fused
        held = ChunkCache(self._source(), sys.maxsize)
        self._fused(prompt, mode, held)
        with peak_memory(device) as without_reading:
            self._fused(prompt, mode, held)
        return Facts(passes, rows, bytes_read, peak.bytes, without_reading.bytes, **records, bytes_spared=spared)

    def _sizes(self, segment: Segment) -> list[int]:
        return self._store.payload_sizes(segment.source.chunk_id, segment.source.level or RAW)

    def _source(self) -> StoreSource:
        return StoreSource(self._store, self.decoder, self._profiles)

    def _plain(self, prompt: BenchPrompt) -> Sample:
        plan = prompt.plan(self._store)
        model, device = self.decoder.model, self.decoder.device
        with self.decoder.plain_attention(), torch.inference_mode():
            synchronize(device)
            started = time.perf_counter()
            ids = torch.tensor([plan.ids], device=device)
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(out.logits[0, -1].argmax())
            synchronize(device)
            return Sample((time.perf_counter() - started) * 1e3)

    def _fused(
        self, prompt: BenchPrompt, mode: str, source: KVSource | None = None, shift: bool = True
    ) -> tuple[Sample, Fused]:
        decoder = self.decoder
        options = self._options if shift else replace(self._options, shift=False)
        synchronize(decoder.device)
        started, busy = time.perf_counter(), time.thread_time()
        source = source or self._source()
        plan = prompt.plan(self._store)
        planned = time.perf_counter()
        fused = fuse(decoder, plan, selector_for(options, mode), source)
        int(fused.logits.argmax())
        synchronize(decoder.device)
        ended, cpu_ms = time.perf_counter(), (time.thread_time() - busy) * 1e3
        return Sample((ended - started) * 1e3, (planned - started) * 1e3, fused.timing, cpu_ms), fused


def _check_whole(fused: Fused) -> None:
    """A hole is computed in place: times would not be those of reuse."""
    holes = [segment for segment in fused.plan.segments[:-1] if segment.status == "miss" and segment.ids]
    if holes:
        raise DamagedError(f"a record cannot be used: {holes[0].reason}", REPAIR)


def warm_up(answerer: Answerer, prompt: BenchPrompt, modes: Sequence[str]) -> None:
    """Every mode once over a short prompt: machine code, tables and handles are made at the first call."""
    for mode in modes:
        answerer.sample(prompt.shortest(), mode)
