"""Passes of a model over chosen rows of a prompt, by the fastest forward that serves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.common.collecting import quiet
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.model.attention import PlacedRows, QueryRows
from kvtool.core.model.cpu_layer import cpu_layers
from kvtool.core.model.cuda_layer import cuda_layers
from kvtool.core.model.forward import Forward
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.passes import NOTHING, OnLayer, Pass
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.spec import ModelSpec, UnsupportedArchitecture, read_model_spec
from kvtool.core.model.stack import DecoderStack

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import StateForms

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
        on_gpu = self.device.startswith("cuda")
        if not on_gpu and self.device != "cpu":
            raise UnsupportedArchitecture(f"there is no layer for {self.device}")
        self.spec.check_served()
        try:
            layers, ends = (cuda_layers if on_gpu else cpu_layers)(self, self.spec)
        except (AttributeError, ValueError, RuntimeError, TypeError) as error:  # modules that only look known
            raise UnsupportedArchitecture(str(error)) from error
        return Forward(self, layers, ends)

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
        position_ids: torch.Tensor | None = None,
        on_layer: OnLayer = NOTHING,
    ) -> torch.Tensor:
        """Compute rows of a prompt over its cache; return logits of the last `keep` rows, float32 `[keep, vocabulary]`.
        Of `tokens` on the device nothing is read on the host. `position_ids`: rotary positions `[rows]` on the device,
        where they are not the rows' places."""
        ids = tokens if isinstance(tokens, torch.Tensor) else self.device_ids(tokens)
        positions = rows.places if position_ids is None else position_ids
        with out_of_memory_hint(len(ids)):
            return self.forward.logits(Pass(ids, rows, positions, cache, on_layer), keep)

    @torch.inference_mode()
    def fill_cache(
        self,
        tokens: Sequence[int] | torch.Tensor,
        rows: PlacedRows,
        cache: PromptCache,
        position_ids: torch.Tensor | None = None,
        on_layer: OnLayer = NOTHING,
    ) -> None:
        ids = tokens if isinstance(tokens, torch.Tensor) else self.device_ids(tokens)
        positions = rows.places if position_ids is None else position_ids
        with out_of_memory_hint(len(ids)):
            self.forward.fill(Pass(ids, rows, positions, cache, on_layer))

    @torch.inference_mode()
    def prefill_stored(self, ids: Sequence[int]) -> PromptCache:
        """Prefill what a store keeps, or what is before it (`Pass.exact`)."""
        cache, rows = self.filled_cache(len(ids)), QueryRows.of(torch.arange(len(ids)), self.device)
        with out_of_memory_hint(len(ids)):
            self.forward.fill(Pass(self.device_ids(ids), rows, rows.places, cache, exact=True))
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
        rows, at = self._behind(cache, len(ids))
        return self.compute(ids, rows, cache, keep=len(ids), position_ids=at)

    def append(self, ids: Sequence[int], cache: PromptCache) -> None:
        """Append `ids` to the cache as `extend` does, without the LM head, in pieces: memory is bounded, and other
        passes may run between two layers of each."""
        for start in range(0, len(ids), _PIECE):
            piece = ids[start : start + _PIECE]
            rows, at = self._behind(cache, len(piece))
            self.fill_cache(piece, rows, cache, at)

    def _behind(self, cache: PromptCache, count: int) -> tuple[QueryRows, torch.Tensor | None]:
        start = cache.buffers[0].length
        cache.set_length(start + count)
        rows = QueryRows.of(torch.arange(start, start + count), self.device, cache.position_ids)
        return rows, rows.places + cache.dropped if cache.dropped else None


@contextmanager
def out_of_memory_hint(rows: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or --device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        raise KvtoolError(f"out of memory computing {rows} rows", f"use fewer chunks (--top-k){elsewhere}") from error
