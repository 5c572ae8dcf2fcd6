"""Forward passes of a model over chosen rows of a prompt, on the fastest path that serves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.checkpoint.load import Loaded, plain_attention
from kvtool.core.common.collecting import quiet
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.model import attention
from kvtool.core.model.attention import PlacedRows, QueryRows
from kvtool.core.model.captured import CapturedWorks
from kvtool.core.model.layer_cpu import in_team, install_fused_layers
from kvtool.core.model.layer_cuda import FusedForward
from kvtool.core.model.modules import cache_name, prune_rows
from kvtool.core.model.preemption import preemptible
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.spec import ModelSpec, UnsupportedArchitecture, read_model_spec
from kvtool.core.model.stack import DecoderStack
from kvtool.core.native.threads import use_pool

if TYPE_CHECKING:
    from kvtool.core.model.states import StateForms

_PIECE = 512  # rows that are appended to a cache at once
_OTHERWISE = "the model keeps its state in a way of its own; that would need a layer of the prompt cache for it"


class Decoder(DecoderStack):
    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(loaded, kv_dtype)
        self._head = HeadRows()
        self.model.get_output_embeddings().register_forward_pre_hook(self._head)
        # Why rows go through the model's own layers; "": they go through fused ones. A CPU tries it at the first pass.
        self.unfused: str | None = None
        self._fused: FusedForward | None = None  # of a model on a GPU
        self.captured = CapturedWorks()
        self.state_forms: dict[int, StateForms] = {}  # by layer and state
        if self.keeps_states:
            self._check_states()
        elif self.device.startswith("cuda"):
            self.unfused = self._try_fused()

    def _try_fused(self) -> str:
        if self.keeps_states:
            return "the model keeps states"
        try:
            if self.device == "cpu":
                install_fused_layers(self, self.spec)
            else:
                self._fused = FusedForward.tried(self, self.spec, self.prefill)
        except UnsupportedArchitecture as error:
            return str(error)
        return ""

    def _check_states(self) -> None:
        from kvtool.core.model.states import StateCache, StateLayer  # of transformers

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
    def forward(self) -> str:
        return f"torch: {self.unfused}" if self.unfused else "fused"

    @property
    def fused_forward(self) -> FusedForward | None:
        """The fused pass of a GPU; None: the model has none here, or hooks listen to its modules."""
        return None if self._fused is None or self.hooked else self._fused

    @torch.inference_mode()
    def compute(
        self,
        tokens: Sequence[int] | torch.Tensor,
        rows: PlacedRows,
        cache: PromptCache,
        keep: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute rows of a prompt over its cache; return logits of the last `keep` rows, float32 `[keep, vocabulary]`.
        Of `tokens` on the device nothing is read on the host. `position_ids`: rotary positions `[rows]` on the device,
        where they are not the rows' places."""
        ids = tokens if isinstance(tokens, torch.Tensor) else self.device_ids(tokens)
        with out_of_memory_hint(len(ids)), self._head.only(keep):
            if (fused := self.fused_forward) is not None:
                return fused.compute(ids, rows, cache, keep, position_ids)
            if self.shares:
                keep = min(keep, len(ids))
                # given a tensor of rows, the model does not cut its own inputs
                wanted = torch.arange(len(ids) - keep, len(ids), device=self.device)
                with prune_rows(self.layers[len(self.shapes) :], keep):
                    out = self._run(self.model, ids, rows, cache, position_ids, logits_to_keep=wanted)
            else:
                out = self._run(self.model, ids, rows, cache, position_ids, logits_to_keep=keep)
            logits: torch.Tensor = out.logits[0].float()
            return logits

    @torch.inference_mode()
    def fill_cache(
        self, tokens: Sequence[int], rows: QueryRows, cache: PromptCache, position_ids: torch.Tensor | None = None
    ) -> None:
        with out_of_memory_hint(len(rows)):
            if (fused := self.fused_forward) is not None:
                fused.hidden(self.device_ids(tokens), rows, cache, len(tokens), position_ids)
            else:
                self._run(self.base, self.device_ids(tokens), rows, cache, position_ids)

    def _run(
        self, module: Any, ids: torch.Tensor, rows: PlacedRows, cache: PromptCache, at: torch.Tensor | None, **more: Any
    ) -> Any:
        if self.device == "cpu" and self.unfused is None:
            self.unfused = self._try_fused()
        cache.rows = rows
        # Torch's own threads wait spinning after its products: the pool's would only take turns with those.
        pooled = self.device == "cpu" and in_team(self.layers[0], len(ids), rows)
        try:
            pool = use_pool(torch.get_num_threads() if pooled else 1)
            with pool, attention.rows_of_pass(lambda: cache.rows), preemptible(self.layers):
                return module(
                    input_ids=ids[None],
                    position_ids=(rows.places if at is None else at)[None],
                    use_cache=True,
                    rows=rows,
                    **{cache_name(self.base): cache},
                    **more,
                )
        finally:
            cache.rows = None

    @torch.inference_mode()
    def prefill_stored(self, ids: Sequence[int]) -> PromptCache:
        """Prefill what a store keeps, or what is before it, by the model's own forward (`QueryRows.exact_forward`)."""
        cache = self.new_cache(len(ids))
        cache.set_length(len(ids))
        rows = replace(QueryRows.of(torch.arange(len(ids)), self.device), exact_forward=True)
        with out_of_memory_hint(len(ids)):
            self._run(self.base, self.device_ids(ids), rows, cache, None)
        return cache

    def prefill(self, ids: Sequence[int], reserve: int = 0) -> tuple[torch.Tensor, PromptCache]:
        cache = self.new_cache(len(ids) + reserve)
        cache.set_length(len(ids))
        rows = QueryRows.of(torch.arange(len(ids)), self.device)
        return self.compute(ids, rows, cache)[-1], cache

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
    def plain_attention(self) -> Iterator[None]:
        """Use `transformers`' default attention inside: for a plain call of the model, and for gradients."""
        gradients = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        self.model.set_attn_implementation(plain_attention(self.model))
        self.model.requires_grad_(False)
        try:
            yield
        finally:
            self.model.set_attn_implementation(attention.IMPLEMENTATION)
            for parameter, wanted in gradients:
                parameter.requires_grad_(wanted)


class HeadRows:
    """Gives the LM head only the rows that are needed, contiguous: for a slice's strides, `matmul` copies the whole
    weight first (0.8 s of 1.1 for Qwen2.5's 152k tokens). Gemma 4 takes fewer rows for a sign that rows were left out
    already, so its rows are left out here."""

    def __init__(self) -> None:
        self._keep: int | None = None

    @contextmanager
    def only(self, keep: int) -> Iterator[None]:
        before, self._keep = self._keep, keep
        try:
            yield
        finally:
            self._keep = before

    def __call__(self, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = args[0] if self._keep is None else args[0][..., -self._keep :, :]
        return (rows.flatten().view(rows.shape), *args[1:])


@contextmanager
def out_of_memory_hint(rows: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or --device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        raise KvtoolError(f"out of memory computing {rows} rows", f"use fewer chunks (--top-k){elsewhere}") from error
