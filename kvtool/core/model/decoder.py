"""A loaded model as a stack of decoder layers whose rows and cache are ours to choose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.checkpoint.load import Loaded, plain_attention, quiet
from kvtool.core.checkpoint.support import ONLY_EXACTLY, context_limit, keeps_states
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.common.turns import Turns
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, UsageError
from kvtool.core.kernels.attention import dispatch
from kvtool.core.model import attention
from kvtool.core.model.attention import Placing, Rows
from kvtool.core.model.between import giving_way
from kvtool.core.model.kinds import KVShape, kinds_of
from kvtool.core.model.latent import attend_latents
from kvtool.core.model.lean import lean_pass
from kvtool.core.model.modules import attentions_of, base_of, cache_name, layers_of, still
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.rotary import Rotary
from kvtool.core.model.rowwise.layer import in_team, install_fused_layers
from kvtool.core.model.spec import ModelSpec, Projection, read_model_spec
from kvtool.core.model.states import StateCache, StateForms, StateLayer
from kvtool.core.model.tail import last_rows_only
from kvtool.core.model.trial import UnsupportedArchitecture
from kvtool.core.native.threads import use_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtool.core.model.lean import LeanPass


_PIECE = 512  # rows that are appended to a cache at once
_OTHERWISE = "the model keeps its state in a way of its own; that would need a layer of the prompt cache for it"


class Decoder:
    """The language model of a store, driven with chosen rows.

    What differs between model families is found here from the modules themselves; no model code is copied.

    Attributes
    ----------
    layers : the decoder layers; `kinds`: what the attention of each is.
    dtype, kv_dtype : what it computes in; what keys and values are stored in, the same unless a CPU is slow in that.
    shapes : of the keys and values of each layer that keeps some: the first layers of a model whose last ones attend to
        what those keep, or all.
    context : the longest prompt, in tokens, that the model takes.
    state_forms : of a model that keeps states, by layer and state the number format and sizes that its forward makes.
    unfused : why rows go through the model's own layers, and not through fused ones; "": they do; None: a CPU has not
        tried it yet.
    turns : for threads that take turns in running it.
    """

    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        attention.register()
        self.loaded = loaded
        self.turns = Turns()
        self.model: Any = loaded.model
        self.model.set_attn_implementation(attention.IMPLEMENTATION)
        self.model.generation_config = _special_ids_only(self.model.generation_config)
        self._head = _HeadRows()
        self.model.get_output_embeddings().register_forward_pre_hook(self._head)
        self.config = self.model.config
        self.base: Any = base_of(self.model)
        self.layers: list[torch.nn.Module] = layers_of(self.base)
        self.keeps_states = keeps_states(self.config)
        attentions = attentions_of(self.layers, in_some=self.keeps_states)
        attend_latents([*attentions.values()], attention.IMPLEMENTATION)
        self.dtype: torch.dtype = self.model.dtype
        self.kv_dtype: torch.dtype = kv_dtype or self.dtype
        self.device: str = loaded.device
        dispatch.prepare(self.dtype, self.device)
        modules = list(attentions.values())
        still(modules)
        self.kinds, samples = kinds_of(self.base, attentions, self.config, self.dtype, self.device)
        self.shapes = tuple(kind.shape for kind in self.kinds if kind.source is None)
        self._attending = tuple(attentions)
        self._rotary: Rotary | None = None
        with suppress(ModelError) if self.keeps_states else nullcontext():  # that one can do without
            self._rotary = Rotary(self.base, modules, self.kinds, samples, self.dtype, self.device)
        self.unfused: str | None = None  # tried at the first pass
        self.context = context_limit(self.config)
        self._lean: LeanPass | None = None  # of a model on a GPU
        self.state_forms: dict[int, StateForms] = {}
        if self.keeps_states:
            self._check_states()
        else:
            self._find_fused_pass()

    def _find_fused_pass(self) -> None:
        if not self.device.startswith("cuda"):
            return
        try:
            self._lean, self.unfused = lean_pass(self), ""
        except UnsupportedArchitecture as error:
            self.unfused = str(error)

    def _check_states(self) -> None:
        """Compute two tokens and one more, and look whether the states are kept where they are looked for; what
        `transformers` has to say of kernels that it lacks it says here, to nobody."""
        try:
            with quiet():
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

    @property
    def rotary(self) -> Rotary:
        """What moves its keys.

        Raises
        ------
        ModelError : it keeps states, and its keys cannot be moved.
        """
        if self._rotary is None:
            needed = "that would need keys that are rotated by their positions alone"
            raise ModelError(f"keys of the model cannot be moved to another place; {needed}", ONLY_EXACTLY)
        return self._rotary

    @cached_property
    def spec(self) -> ModelSpec[Projection]:
        """What its layers compute.

        Raises
        ------
        UnsupportedArchitecture : something that no fast path knows.
        """
        return read_model_spec(self)

    @property
    def hooked(self) -> bool:
        """Whether anyone listens to the model's modules just now: only its own forward would tell them."""
        listened = (module for module in self.base.modules() if module._forward_hooks or module._forward_pre_hooks)
        return next(listened, None) is not None

    @property
    def forward(self) -> str:
        """How rows of a prompt are computed: "fused", or "torch" and why they are not."""
        return f"torch: {self.unfused}" if self.unfused else "fused"

    @property
    def lean(self) -> LeanPass | None:
        """The pass of few operations, where the model has one here and nobody listens to its modules."""
        return None if self._lean is None or self.hooked else self._lean

    def new_cache(self, capacity: int) -> PromptCache:
        """An empty prompt cache with room for `capacity` tokens."""
        if self.keeps_states:
            shapes = dict(zip(self._attending, self.shapes, strict=True))
            return StateCache(self.config, lambda layer: (shapes[layer], capacity, self.dtype, self.device))
        return PromptCache(self.shapes, capacity, self.dtype, self.device)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the raw keys and values of `tokens` tokens over all layers."""
        return sum(shape.numbers for shape in self.shapes) * self.kv_dtype.itemsize * tokens

    @property
    def channels(self) -> int:
        """Numbers of a token's keys, or of its values, in the layer that keeps most."""
        return max(shape.channels for shape in self.shapes)

    @property
    def plain_shape(self) -> KVShape | None:
        """The shape of all layers, where they have one and keys are as wide as values: what fast paths are made for."""
        own = self.shapes[0] if len(set(self.shapes)) == 1 and not self.shares else None
        return own if own is not None and own.is_plain else None

    @property
    def stored_layers(self) -> int:
        """How many layers have records of a chunk."""
        return len(self.layers) if self.keeps_states else len(self.shapes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many positions a row sees at each layer that keeps keys and values; None: all before it."""
        return tuple(kind.window for kind in self.kinds if kind.source is None)

    @property
    def shares(self) -> bool:
        """Whether some layers keep nothing, and attend to what others keep."""
        return len(self.shapes) < len(self.kinds)

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
        return self.compute_there(self.ids_there(tokens), rows, cache, keep, position_ids)

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
        with out_of_memory_hint(len(ids)), self._head.only(keep):
            if (lean := self.lean) is not None:
                return lean.compute(ids, rows, cache, keep, position_ids)
            if self.shares:
                out = self._run_sharing(ids, rows, cache, position_ids, min(keep, len(ids)))
            else:
                out = self._run(self.model, ids, rows, cache, position_ids, logits_to_keep=keep)
            logits: torch.Tensor = out.logits[0].float()
            return logits

    def _run_sharing(
        self, ids: torch.Tensor, rows: Placing, cache: PromptCache, position_ids: torch.Tensor | None, keep: int
    ) -> Any:
        """The forward of a model whose last layers keep nothing; told a tensor it does not cut its own inputs."""
        wanted = torch.arange(len(ids) - keep, len(ids), device=self.device)
        with last_rows_only(self.layers[len(self.shapes) :], keep):
            return self._run(self.model, ids, rows, cache, position_ids, logits_to_keep=wanted)

    @torch.inference_mode()
    def walk(
        self, tokens: Sequence[int], rows: Rows, cache: PromptCache, position_ids: torch.Tensor | None = None
    ) -> None:
        """Compute rows of a prompt over its cache as `compute` does, without the LM head."""
        with out_of_memory_hint(len(rows)):
            if (lean := self.lean) is not None:
                lean.walk(self.ids_there(tokens), rows, cache, position_ids)
            else:
                self._run(self.base, self.ids_there(tokens), rows, cache, position_ids)

    def ids_there(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids on the device, int64 `[tokens]`.

        Raises
        ------
        DamagedError : one is none of the model's: they may come from a store, and a GPU would not outlive it.
        """
        known = self.model.get_input_embeddings().num_embeddings
        if tokens and not 0 <= min(tokens) <= max(tokens) < known:
            wrong = next(token for token in tokens if not 0 <= token < known)
            raise DamagedError(
                f"token {wrong} is none of the model's {known:,}",
                "`kvtool store verify`; where that finds nothing, the model's tokenizer is another's",
            )
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
        if self.device == "cpu" and self.unfused is None:
            self.unfused = "the model keeps states" if self.keeps_states else install_fused_layers(self)
        cache.rows = rows
        # Beside torch's own threads, which wait spinning after its products, helpers would only take turns with those.
        alone = self.device == "cpu" and in_team(self.layers[0], len(ids), rows)
        try:
            pool = use_pool(torch.get_num_threads() if alone else 1)
            with pool, attention.passing(lambda: cache.rows), giving_way(self.layers):
                return module(
                    input_ids=ids[None],
                    position_ids=(rows.positions if position_ids is None else position_ids)[None],
                    use_cache=True,
                    rows=rows,
                    **{cache_name(self.base): cache},
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
            self._run(self.base, self.ids_there(ids), rows, cache)
        return cache

    def prefill(self, ids: Sequence[int], reserve: int = 0) -> tuple[torch.Tensor, PromptCache]:
        """Plain full prefill: logits of the last token, float32 `[vocabulary]`, and the cache."""
        cache = self.new_cache(len(ids) + reserve)
        cache.set_length(len(ids))
        rows = Rows.of(torch.arange(len(ids)), self.device)
        return self.compute(ids, rows, cache)[-1], cache

    def extend(self, ids: Sequence[int], cache: PromptCache) -> torch.Tensor:
        """Append `ids` to the cache; logits after each, float32 `[len(ids), vocabulary]`."""
        rows, at = self._behind(cache, len(ids))
        return self.compute(ids, rows, cache, keep=len(ids), position_ids=at)

    def append(self, ids: Sequence[int], cache: PromptCache) -> None:
        """Append `ids` to the cache as `extend` does, without the LM head.

        Many are computed in pieces: memory is bounded, and others may go on, or the work may end, between two layers of
        each piece.
        """
        for start in range(0, len(ids), _PIECE):
            piece = ids[start : start + _PIECE]
            rows, at = self._behind(cache, len(piece))
            self.walk(piece, rows, cache, at)

    def _behind(self, cache: PromptCache, count: int) -> tuple[Rows, torch.Tensor | None]:
        """Rows for `count` more tokens of a cache, and their positions where these are not their places."""
        start = cache.buffers[0].length
        cache.set_length(start + count)
        rows = Rows.of(torch.arange(start, start + count), self.device, cache.turned_to)
        return rows, rows.positions + cache.dropped if cache.dropped else None

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

    def check_length(self, tokens: int, hint: str) -> None:
        """Refuse a prompt that the model cannot hold."""
        if tokens > self.context:
            raise UsageError(f"the prompt has {tokens} tokens, the model takes {self.context}", hint)


class _HeadRows:
    """Gives the LM head the rows that are asked for, with the strides of a tensor of their own.

    For those of a slice, `matmul` copies the head's whole weight first, which took longer than all layers together
    (0.8 s of 1.1 for Qwen2.5's 152k tokens). A model that tells by the number of rows whether some have been left out
    already (Gemma 4) takes those that its layers no longer compute for such.
    """

    def __init__(self) -> None:
        self._keep: int | None = None

    @contextmanager
    def only(self, keep: int) -> Iterator[None]:
        """The last `keep` rows within."""
        before, self._keep = self._keep, keep
        try:
            yield
        finally:
            self._keep = before

    def __call__(self, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = args[0] if self._keep is None else args[0][..., -self._keep :, :]
        return (rows.flatten().view(rows.shape), *args[1:])


def _special_ids_only(config: Any) -> Any:
    """Make a generation config that keeps the special ids only.

    A checkpoint's habits would hold from the second answer token on and not for the first: Qwen2.5's repetition penalty
    of 1.1, for example, works against words copied from the passages.
    """
    from transformers.generation.configuration_utils import GenerationConfig

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
