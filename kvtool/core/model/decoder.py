"""A loaded model as a stack of decoder layers whose rows and cache are ours to choose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model import attention
from kvtool.core.model.attention import Placing, Rows
from kvtool.core.model.kernels import compile_ahead
from kvtool.core.model.lean import lean_pass
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.rotary import Rotary
from kvtool.core.model.rowwise.layer import in_team, quicken
from kvtool.core.model.support import context_limit
from kvtool.core.native.crew import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtool.core.model.lean import LeanPass
    from kvtool.core.model.load import Loaded


class Decoder:
    """The language model of a store, driven with chosen rows.

    What differs between model families is found here from the modules themselves; no model code is copied.

    Attributes
    ----------
    layers : the decoder layers.
    dtype, kv_dtype : what it computes in; what keys and values are stored in, the same unless a CPU is slow in that.
    kv_heads, head_dim : shape of one token's keys and values.
    context : the longest prompt, in tokens, that the model takes.
    """

    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        attention.register()
        self.loaded = loaded
        self.model: Any = loaded.model
        self.model.set_attn_implementation(attention.IMPLEMENTATION)
        self.model.generation_config = _special_ids_only(self.model.generation_config)
        self.model.get_output_embeddings().register_forward_pre_hook(_compact)
        self.config = self.model.config
        self.base: Any = self.model.get_decoder()
        self.layers: list[torch.nn.Module] = list(self.base.layers)
        attentions: list[Any] = [layer.self_attn for layer in self.base.layers]
        self.dtype: torch.dtype = self.model.dtype
        self.kv_dtype: torch.dtype = kv_dtype or self.dtype
        self.device: str = loaded.device
        if self.device == "cpu":
            compile_ahead(self.dtype)
        self.rotary = Rotary(self.base, attentions, self.dtype, self.device)
        self.head_dim: int = attentions[0].head_dim
        self._quick: bool | None = None  # whether its layers compute rows the quick way; tried at the first pass
        self.kv_heads: int = self.config.num_key_value_heads
        self.context = context_limit(self.config)
        self._lean: LeanPass | None = None
        self._lean = lean_pass(self)

    @property
    def hooked(self) -> bool:
        """Whether anyone listens to the model's modules just now: only its own forward would tell them."""
        listened = (module for module in self.base.modules() if module._forward_hooks or module._forward_pre_hooks)
        return next(listened, None) is not None

    @property
    def lean(self) -> LeanPass | None:
        """The pass of few operations, where the model has one here and nobody listens to its modules."""
        return None if self._lean is None or self.hooked else self._lean

    def new_cache(self, capacity: int) -> PromptCache:
        """An empty prompt cache with room for `capacity` tokens."""
        shape = (1, self.kv_heads, capacity, self.head_dim)
        return PromptCache(len(self.layers), shape, self.dtype, self.device)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the raw keys and values of `tokens` tokens over all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.kv_dtype.itemsize * tokens

    def compute(
        self,
        tokens: Sequence[int],
        rows: Rows,
        cache: PromptCache,
        keep: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute rows of a prompt over its cache.

        Parameters
        ----------
        tokens : the token ids that stand at `rows`.
        keep : how many of the last rows go through the LM head.
        position_ids : rotary positions `[rows]` on the model's device where they are not the rows' places.

        Returns
        -------
        Logits of the last `keep` rows, float32 `[keep, vocabulary]`.
        """
        return self.compute_there(self._there(tokens), rows, cache, keep, position_ids)

    @torch.inference_mode()
    def compute_there(
        self,
        ids: torch.Tensor,
        rows: Placing,
        cache: PromptCache,
        keep: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do what `compute` does with token ids that are on the device, int64 `[rows]`; nothing is read on the host."""
        with out_of_memory_hint(len(ids)):
            if (lean := self.lean) is not None:
                return lean.compute(ids, rows, cache, keep, position_ids)
            out = self._run(self.model, ids, rows, cache, position_ids, logits_to_keep=keep)
            logits: torch.Tensor = out.logits[0].float()
            return logits

    @torch.inference_mode()
    def walk(
        self, tokens: Sequence[int], rows: Rows, cache: PromptCache, position_ids: torch.Tensor | None = None
    ) -> None:
        """Compute rows of a prompt over its cache as `compute` does, without the LM head."""
        with out_of_memory_hint(len(rows)):
            if (lean := self.lean) is not None:
                lean.walk(self._there(tokens), rows, cache, position_ids)
            else:
                self._run(self.base, self._there(tokens), rows, cache, position_ids)

    def _there(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids on the device, int64 `[tokens]`."""
        return torch.tensor(list(tokens)).to(self.device, non_blocking=True)

    def _run(
        self,
        module: Any,
        ids: torch.Tensor,
        rows: Placing,
        cache: PromptCache,
        position_ids: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """The model's own forward."""
        if self.device == "cpu" and self._quick is None:
            self._quick = quicken(self)
        cache.rows = rows
        # Beside torch's own threads, which wait spinning after its products, helpers would only take turns with those.
        alone = self.device == "cpu" and in_team(self.layers[0], len(ids), rows)
        try:
            with gathered(torch.get_num_threads() if alone else 1):
                return module(
                    input_ids=ids[None],
                    position_ids=(rows.positions if position_ids is None else position_ids)[None],
                    past_key_values=cache,
                    use_cache=True,
                    rows=rows,
                    **more,
                )
        finally:
            cache.rows = None

    @torch.inference_mode()
    def prefill_stored(self, ids: Sequence[int]) -> PromptCache:
        """Prefill what is kept in a store or what stands before it, by the model's own forward: see `Rows.stored`."""
        cache = self.new_cache(len(ids))
        cache.set_length(len(ids))
        rows = replace(Rows.of(torch.arange(len(ids)), self.device), stored=True)
        with out_of_memory_hint(len(ids)):
            self._run(self.base, self._there(ids), rows, cache)
        return cache

    def prefill(self, ids: Sequence[int], reserve: int = 0) -> tuple[torch.Tensor, PromptCache]:
        """Plain full prefill: logits of the last token, float32 `[vocabulary]`, and the cache."""
        cache = self.new_cache(len(ids) + reserve)
        cache.set_length(len(ids))
        rows = Rows.of(torch.arange(len(ids)), self.device)
        return self.compute(ids, rows, cache)[-1], cache

    def extend(self, ids: Sequence[int], cache: PromptCache) -> torch.Tensor:
        """Append `ids` to the cache; logits after each, float32 `[len(ids), vocabulary]`."""
        start = cache.buffers[0].length
        cache.set_length(start + len(ids))
        rows = Rows.of(torch.arange(start, start + len(ids)), self.device)
        at = rows.positions + cache.dropped if cache.dropped else None
        return self.compute(ids, rows, cache, keep=len(ids), position_ids=at)

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Use `transformers`' default attention inside: for a plain call of the model, and for gradients."""
        gradients = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        self.model.set_attn_implementation("sdpa")
        self.model.requires_grad_(False)
        try:
            yield
        finally:
            self.model.set_attn_implementation(attention.IMPLEMENTATION)
            for parameter, wanted in gradients:
                parameter.requires_grad_(wanted)

    def check_length(self, tokens: int, hint: str) -> None:
        """Refuse a prompt that the model cannot hold."""
        if tokens > self.context:
            raise UsageError(f"the prompt has {tokens} tokens, the model takes {self.context}", hint)


def _compact(head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give the LM head's input the strides of a tensor of its own.

    For those of a slice, `matmul` copies the head's whole weight first, which took longer than all layers together
    (0.8 s of 1.1 for Qwen2.5's 152k tokens).
    """
    return (args[0].flatten().view(args[0].shape), *args[1:])


def _special_ids_only(config: Any) -> Any:
    """Make a generation config that keeps the special ids only.

    A checkpoint's habits would hold from the second answer token on and not for the first: Qwen2.5's repetition penalty
    of 1.1, for example, works against words copied from the passages.
    """
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(config, name, None) for name in names})


@contextmanager
def out_of_memory_hint(rows: int) -> Iterator[None]:
    """Turn an allocation failure into an error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or --device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        raise KvtoolError(f"out of memory computing {rows} rows", f"use fewer chunks (--top-k){elsewhere}") from error
