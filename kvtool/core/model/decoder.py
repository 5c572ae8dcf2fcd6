"""Passes of a model over chosen rows of a prompt, by the fastest forward that serves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.common.collecting import quiet
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.model.cpu_layer import cpu_forward
from kvtool.core.model.cuda_layer import cuda_forward
from kvtool.core.model.forward import NOTHING, Forward, OnLayer, Pass, PlacedRows, QueryRows
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.spec import ModelSpec, UnsupportedArchitecture, read_model_spec
from kvtool.core.model.stack import DecoderStack

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import StateCache, StateForms, StateLayer


_PIECE = 512  # rows that are appended to a cache at once
_OTHERWISE = "the model keeps its state in a way of its own; that would need a layer of the prompt cache for it"


class Decoder(DecoderStack):
    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(loaded, kv_dtype)
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
            return make_forward(self, self.spec)
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


@contextmanager
def out_of_memory_hint(rows: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or --device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        raise KvtoolError(f"out of memory computing {rows} rows", f"use fewer chunks (--top-k){elsewhere}") from error


# Asked without importing transformers.


def is_recurrent(cache: PromptCache | None) -> TypeGuard[StateCache]:
    return cache is not None and cache.is_recurrent


def has_state(layer: Any) -> TypeGuard[StateLayer]:
    return hasattr(layer, "states")
