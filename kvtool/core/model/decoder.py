"""Decoder: a loaded model's layers, and passes over chosen rows of a prompt by the fastest forward that serves it.

What differs between model families is read off the modules themselves. No model code is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.checkpoint.support import ONLY_EXACTLY, context_limit, keeps_states
from kvtool.core.common.collecting import quiet
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, UsageError
from kvtool.core.kernels.attention import dispatch
from kvtool.core.model.attention import PlacedRows, QueryRows
from kvtool.core.model.cpu_layer import cpu_forward
from kvtool.core.model.cuda_layer import cuda_forward
from kvtool.core.model.forward import Forward
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.hf.probing import probed
from kvtool.core.model.kinds import KVShape, outline_of
from kvtool.core.model.passes import NOTHING, OnLayer, Pass
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rope import Rotary
from kvtool.core.model.spec import ModelSpec, UnsupportedArchitecture, read_model_spec
from kvtool.core.model.stack import Turns

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import StateForms

_PIECE = 512  # rows that are appended to a cache at once
_OTHERWISE = "the model keeps its state in a way of its own; that would need a layer of the prompt cache for it"


class Decoder:
    """The decoder layers of a loaded model, whose attention is computed by kvtool from here on. If last layers attend
    to KV of earlier ones, `shapes` are of the latter."""

    _between: Callable[[], None] | None = None

    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        self.loaded = loaded
        self.turns = Turns()
        self.model: Any = loaded.model
        self.config = self.model.config
        self.keeps_states = keeps_states(self.config)
        self.dtype: torch.dtype = self.model.dtype
        self.kv_dtype: torch.dtype = kv_dtype or self.dtype  # stored; it differs where a CPU is slow in it
        self.device: str = loaded.device
        self.context = context_limit(self.config)  # the longest prompt, in tokens
        dispatch.prepare(self.dtype, self.device)
        outline = outline_of(self.model) if isinstance(self.model, DenseModel) else probed(loaded)
        self.base = outline.base
        self.layers: list[torch.nn.Module] = list(self.base.layers)
        self.kinds = outline.kinds
        self.shapes = tuple(kind.shape for kind in self.kinds if kind.source is None)
        self._attending = outline.attending
        self._rotary: Rotary | None = None
        with suppress(ModelError) if self.keeps_states else nullcontext():  # that one can do without
            self._rotary = Rotary(self.base, self.kinds, outline.samples, self.dtype, self.device)
        self.state_forms: dict[int, StateForms] = {}  # by layer and state
        if self.keeps_states:
            self._check_states()

    @cached_property
    def forward(self) -> Forward | HfForward:
        """The forward that computes all passes. Ours serves a model of transformers if it passes the self-check."""
        from kvtool.core.model.hf.check import check_forward

        try:
            if self.keeps_states:
                raise UnsupportedArchitecture("the model keeps states")
            forward = self._forward()
            if not isinstance(self.model, DenseModel):
                with self.pausing(None):
                    check_forward(self, forward, self)
            return forward
        except UnsupportedArchitecture as error:
            return HfForward(self, str(error))

    def _forward(self) -> Forward:
        make_forward = {"cpu": cpu_forward, "cuda": cuda_forward}.get(self.device.partition(":")[0])
        if make_forward is None:
            raise UnsupportedArchitecture(f"there is no layer for {self.device}")
        self.spec.check_served()
        try:
            return make_forward(self)
        except (AttributeError, ValueError, RuntimeError, TypeError) as error:  # modules that only look known
            raise UnsupportedArchitecture(str(error)) from error

    def _check_states(self) -> None:
        from kvtool.core.model.hf.states import StateCache, StateLayer  # of transformers

        try:
            with quiet():  # which warns of missing kernels
                _, cache = self.prefill([0, 0], reserve=1)
                self.extend([0], cache)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ModelError(f"{_OTHERWISE} ({error})", "use another model") from error
        assert isinstance(cache, StateCache)
        if not all(layer.states() for layer in cache.state_layers):
            raise ModelError(_OTHERWISE, "use another model")
        self.state_forms = {
            number: {key: (state.dtype, state.shape) for key, state in layer.states().items()}
            for number, layer in enumerate(cache.buffers)
            if isinstance(layer, StateLayer)
        }

    @cached_property
    def spec(self) -> ModelSpec:
        return read_model_spec(self)

    @property
    def forward_name(self) -> str:
        return f"torch: {self.forward.why}" if self.forward.why else "fused"

    @torch.inference_mode()
    def compute(
        self,
        tokens: Sequence[int] | torch.Tensor,
        rows: PlacedRows,
        cache: PromptCache,
        keep: int = 1,
        on_layer: OnLayer = NOTHING,
    ) -> torch.Tensor:
        """Compute rows of a prompt over its cache; return logits of the last `keep` rows, float32 `[keep, vocabulary]`.
        Of `tokens` on the device nothing is read on the host."""
        ids = tokens if isinstance(tokens, torch.Tensor) else self.device_ids(tokens)
        with out_of_memory_hint(len(ids)):
            return self.forward.logits(Pass(ids, rows, rows.positions, cache, on_layer), keep)

    @torch.inference_mode()
    def fill_cache(
        self,
        tokens: Sequence[int],
        rows: PlacedRows,
        cache: PromptCache,
        on_layer: OnLayer = NOTHING,
        exact: bool = False,
    ) -> None:
        """Compute rows of a prompt up to the keys and values of the last layer."""
        with out_of_memory_hint(len(tokens)):
            self.forward.fill(Pass(self.device_ids(tokens), rows, rows.positions, cache, on_layer, exact))

    def prefill_stored(self, ids: Sequence[int]) -> PromptCache:
        """Prefill what a store keeps, or what is before it (`Pass.exact`)."""
        cache, rows = self.filled_cache(len(ids)), QueryRows.of(torch.arange(len(ids)), self.device)
        self.fill_cache(ids, rows, cache, exact=True)
        return cache

    def prefill(self, ids: Sequence[int], reserve: int = 0) -> tuple[torch.Tensor, PromptCache]:
        cache = self.new_cache(len(ids) + reserve)
        cache.set_length(len(ids))
        rows = QueryRows.of(torch.arange(len(ids)), self.device)
        return self.compute(ids, rows, cache)[-1], cache

    def filled_cache(self, length: int) -> PromptCache:
        cache = self.new_cache(length)
        cache.set_length(length)
        return cache

    def extend(self, ids: Sequence[int], cache: PromptCache) -> torch.Tensor:
        """Append `ids` to the cache; return logits after each, float32 `[len(ids), vocabulary]`."""
        return self.compute(ids, self._next_rows(cache, len(ids)), cache, keep=len(ids))

    def append(self, ids: Sequence[int], cache: PromptCache) -> None:
        """Append `ids` to the cache as `extend` does, without the LM head, in pieces: memory is bounded, and other
        passes may run between two layers of each."""
        for start in range(0, len(ids), _PIECE):
            piece = ids[start : start + _PIECE]
            self.fill_cache(piece, self._next_rows(cache, len(piece)), cache)

    def _next_rows(self, cache: PromptCache, count: int) -> QueryRows:
        start = cache.buffers[0].length
        cache.set_length(start + count)
        return QueryRows.of(torch.arange(start, start + count), self.device, cache.position_ids)

    @property
    def rotary(self) -> Rotary:
        if self._rotary is None:
            needed = "that would need keys that are rotated by nothing but their positions"
            raise ModelError(f"keys of the model cannot be moved to another place; {needed}", ONLY_EXACTLY)
        return self._rotary

    @contextmanager
    def pausing(self, work: Callable[[], None] | None) -> Iterator[None]:
        """Call `work` before each layer of all passes inside; its errors end the pass. It may run the model over other
        caches, and is not interrupted itself."""
        before, self._between = self._between, work
        try:
            yield
        finally:
            self._between = before

    def pause(self) -> None:
        """Do the work that others have between two layers (`pausing`)."""
        if (work := self._between) is not None:
            with self.pausing(None):
                work()

    def new_cache(self, capacity: int) -> PromptCache:
        if self.keeps_states:
            from kvtool.core.model.hf.states import StateCache  # of transformers

            shapes = dict(zip(self._attending, self.shapes, strict=True))
            return StateCache(self.config, lambda layer: (shapes[layer], capacity, self.dtype, self.device))
        return PromptCache([BufferLayer(shape, capacity, self.dtype, self.device) for shape in self.shapes])

    def host_memory(self, size: int) -> torch.Tensor:
        """Allocate uint8 on the CPU for what a pass gives: pinned where a GPU does, whose copies then do not wait."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))

    def kv_bytes(self, tokens: int) -> int:
        return sum(shape.numbers for shape in self.shapes) * self.kv_dtype.itemsize * tokens

    @property
    def channels(self) -> int:
        return max(shape.channels for shape in self.shapes)

    @property
    def plain_shape(self) -> KVShape | None:
        """The shape that all layers have, keys as wide as values, as fast paths take it; None: they differ."""
        shape = self.shapes[0] if len(set(self.shapes)) == 1 and not self.shares else None
        return shape if shape is not None and shape.is_plain else None

    @property
    def stored_layers(self) -> int:
        return len(self.layers) if self.keeps_states else len(self.shapes)

    @property
    def shares(self) -> bool:
        return len(self.shapes) < len(self.kinds)

    def device_ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return int64 `[tokens]`. An unknown token may come from a store, and a GPU would not survive it."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise DamagedError(
                f"token {wrong} is none of the model's {vocabulary:,}",
                "`kvtool store verify`; where that finds nothing, the model's tokenizer is another's",
            )
        return torch.tensor(list(tokens)).to(self.device, non_blocking=True)

    def check_length(self, tokens: int, hint: str) -> None:
        if tokens > self.context:
            raise UsageError(f"the prompt has {tokens} tokens, the model takes {self.context}", hint)


@contextmanager
def out_of_memory_hint(rows: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or --device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        raise KvtoolError(f"out of memory computing {rows} rows", f"use fewer chunks (--top-k){elsewhere}") from error
