"""Passes through a model's own modules of `transformers`, whose loop over the layers is reached by hooks only here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtool.core.kernels.attention.params import KV
from kvtool.core.model.hf.attention import is_running, running
from kvtool.core.model.hf.modules import CACHES, CacheProxy, ForwardEnded, LayerProbe, cache_name
from kvtool.core.model.passes import Pass
from kvtool.core.native.threads import use_pool

if TYPE_CHECKING:
    from kvtool.core.model.stack import DecoderStack

Some = slice | torch.Tensor


class HfForward:
    """Passes as of `Forward`; `why` no faster one serves the model."""

    captures = False

    def __init__(self, stack: DecoderStack, why: str) -> None:
        self._stack, self.why = stack, why

    def logits(self, one: Pass, keep: int) -> torch.Tensor:
        stack, wanted = self._stack, cast("Any", keep)
        if stack.shares:  # given a tensor of rows, the model does not cut its own inputs
            keep = min(keep, len(one.ids))
            wanted = torch.arange(len(one.ids) - keep, len(one.ids), device=stack.device)
        head = stack.model.get_output_embeddings().register_forward_pre_hook(partial(_last_rows, one, keep))
        try:
            out = self._run(stack.model, one, keep if stack.shares else None, logits_to_keep=wanted)
        finally:
            head.remove()
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def fill(self, one: Pass) -> None:
        self._run(self._stack.base, one, None)

    def _run(self, module: Any, one: Pass, keep: int | None, **more: Any) -> Any:
        cache, hooks = self._cache(one), _Hooks(self._stack, one, keep)
        handles = [
            layer.register_forward_pre_hook(partial(hooks.before, number), with_kwargs=True)
            for number, layer in enumerate(self._stack.layers)
        ]
        try:
            with running(one), use_pool(1), suppress(ForwardEnded):
                ids, positions = one.ids[None], one.positions[None]
                name = cache_name(self._stack.base)
                return module(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}, **more)
        finally:
            for handle in handles:
                handle.remove()
        return None

    def _cache(self, one: Pass) -> Any:
        if not self._stack.keeps_states:
            return _PassCache(one)
        cache: Any = one.cache
        cache.running = one
        return cache


def _last_rows(one: Pass, keep: int, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    """Give the LM head only the rows that are needed, contiguous: for a slice's strides, `matmul` copies the whole
    weight first. Gemma 4 takes fewer rows for a sign that rows were left out already, so its rows are left out here."""
    if not is_running(one):
        return None
    rows = args[0][..., -keep:, :]
    return (rows.flatten().view(rows.shape), *args[1:])


class _PassCache(CacheProxy):
    """The cache of a pass, as `transformers` asks for it."""

    def __init__(self, one: Pass) -> None:
        def write(keys: torch.Tensor, values: torch.Tensor, layer: int) -> KV:
            if one.cache is None and one.on_layer.collect(layer, keys, values):
                raise ForwardEnded
            return one.write(layer, keys, values)

        super().__init__(write)
        self._cache = one.cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._cache is None else self._cache.buffers[layer_idx].length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


@dataclass(slots=True, eq=False)
class _Hooks:
    """Called before each layer of one pass: narrows its rows. KV-sharing layers at a model's end, which attend to what
    earlier layers keep (Gemma 3n, Gemma 4), compute only the last `keep` rows."""

    stack: DecoderStack
    one: Pass
    keep: int | None
    kept: torch.Tensor | None = None  # indices into the first layer's rows; None: all

    def before(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        one = self.one
        if not is_running(one):  # a pass that runs between the layers of this one
            return None
        self.stack.pause()
        hidden, args = args[0], args[1:]
        if self.kept is not None:
            args, kwargs = _of_rows(args, self.kept), _arguments_of(kwargs, self.kept)
        if layer in one.on_layer.narrows:
            chosen, one.rows = one.on_layer.choose(layer, *_kv_of(module, hidden, kwargs))
            hidden, args, kwargs = hidden[:, chosen], _of_rows(args, chosen), _arguments_of(kwargs, chosen)
            self.kept = chosen if self.kept is None else self.kept[chosen]
        if self.keep is not None and layer >= len(self.stack.shapes):
            some = slice(-self.keep, None)
            hidden, args, kwargs = hidden[:, some], _of_rows(args, some), _arguments_of(kwargs, some)
            one.rows = one.placed.last(self.keep)
        return (hidden, *args), kwargs


def _kv_of(module: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> KV:
    """Run a layer up to its cache write; return its rotated keys and values `[1, kv_heads, rows, head_dim]`."""
    probe = LayerProbe(until="cache")
    probe.run(module.forward, hidden, **(kwargs | {name: probe.cache for name in CACHES if name in kwargs}))
    assert probe.kv is not None, "the layer did not write to its cache"
    return probe.kv


def _of_rows(args: tuple[Any, ...], some: Some) -> tuple[Any, ...]:
    return tuple(value[:, some] if isinstance(value, torch.Tensor) else value for value in args)


def _arguments_of(kwargs: dict[str, Any], some: Some) -> dict[str, Any]:
    tables = kwargs["position_embeddings"]
    cut = tables[:, some] if isinstance(tables, torch.Tensor) else tuple(side[:, some] for side in tables)
    changed: dict[str, Any] = {"position_embeddings": cut}
    if kwargs.get("position_ids") is not None:
        changed["position_ids"] = kwargs["position_ids"][..., some]
    return kwargs | changed
