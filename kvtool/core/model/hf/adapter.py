"""Passes through a model's own modules of `transformers`, whose loop over the layers is reached by hooks only here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtool.core.kernels.attention.params import KV
from kvtool.core.model.forward import Pass
from kvtool.core.model.hf.modules import CACHES, CacheProxy, ForwardEnded, LayerProbe, cache_name, is_running, running
from kvtool.core.native.threads import use_pool

if TYPE_CHECKING:
    from kvtool.core.model.stack import DecoderStack

RowIndex = slice | torch.Tensor


class HfForward:
    """Passes as of `Forward`; `why` no faster one serves the model."""

    def __init__(self, decoder: DecoderStack, why: str) -> None:
        self._decoder, self.why = decoder, why

    def logits(self, job: Pass, keep: int) -> torch.Tensor:
        decoder, rows = self._decoder, cast("Any", keep)
        if decoder.shares:  # given a tensor of rows, the model does not cut its own inputs
            keep = min(keep, len(job.ids))
            rows = torch.arange(len(job.ids) - keep, len(job.ids), device=decoder.device)
        head = decoder.model.get_output_embeddings().register_forward_pre_hook(
            partial(_last_rows, job, keep), prepend=True
        )
        try:
            out = self._run(decoder.model, job, keep if decoder.shares else None, logits_to_keep=rows)
        finally:
            head.remove()
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def fill(self, job: Pass) -> None:
        self._run(self._decoder.base, job, None)

    def _run(self, module: Any, job: Pass, keep: int | None, **more: Any) -> Any:
        cache, hooks = self._cache(job), _Hooks(self._decoder, job, keep)
        handles = [
            layer.register_forward_pre_hook(partial(hooks.before, number), with_kwargs=True)
            for number, layer in enumerate(self._decoder.layers)
        ]
        try:
            with running(job), use_pool(1), suppress(ForwardEnded):
                ids, positions = job.ids[None], job.positions[None]
                name = cache_name(self._decoder.base)
                return module(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}, **more)
        finally:
            for handle in handles:
                handle.remove()
        return None

    def _cache(self, job: Pass) -> Any:
        if not self._decoder.keeps_states:
            return _PassCache(job)
        cache: Any = job.cache
        cache.running = job
        return cache


def _last_rows(job: Pass, keep: int, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    """Give the LM head only the rows that are needed, contiguous: for a slice's strides, `matmul` copies the whole
    weight first. Gemma 4 takes fewer rows for a sign that rows were left out already, so its rows are left out here."""
    if not is_running(job):
        return None
    rows = args[0][..., -keep:, :]
    return (rows.flatten().view(rows.shape), *args[1:])


class _PassCache(CacheProxy):
    """The cache of a pass, as `transformers` asks for it."""

    def __init__(self, job: Pass) -> None:
        def write(keys: torch.Tensor, values: torch.Tensor, layer: int) -> KV:
            if job.cache is None and job.on_layer.collect(layer, keys, values):
                raise ForwardEnded
            return job.write(layer, keys, values)

        super().__init__(write)
        self._cache = job.cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._cache is None else self._cache.buffers[layer_idx].length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


@dataclass(slots=True, eq=False)
class _Hooks:
    """Called before each layer of one pass: narrows its rows. KV-sharing layers at a model's end, which attend to what
    earlier layers keep (Gemma 3n, Gemma 4), compute only the last `keep` rows."""

    decoder: DecoderStack
    job: Pass
    keep: int | None
    indices: torch.Tensor | None = None  # indices into the first layer's rows; None: all

    def before(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job = self.job
        if not is_running(job):  # a pass that runs between the layers of this one
            return None
        self.decoder.pause()
        hidden, args = args[0], args[1:]
        if self.indices is not None:
            args, kwargs = _of_rows(args, self.indices), _arguments_of(kwargs, self.indices)
        if layer in job.on_layer.narrows:
            chosen, job.rows = job.on_layer.choose(layer, *_kv_of(module, hidden, kwargs))
            hidden, args, kwargs = hidden[:, chosen], _of_rows(args, chosen), _arguments_of(kwargs, chosen)
            self.indices = chosen if self.indices is None else self.indices[chosen]
        if self.keep is not None and layer >= len(self.decoder.shapes):
            rows = slice(-self.keep, None)
            hidden, args, kwargs = hidden[:, rows], _of_rows(args, rows), _arguments_of(kwargs, rows)
            job.rows = job.placed.last(self.keep)
        return (hidden, *args), kwargs


def _kv_of(module: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> KV:
    """Run a layer up to its cache write; return its rotated keys and values `[1, kv_heads, rows, head_dim]`."""
    probe = LayerProbe(until="cache")
    probe.run(module.forward, hidden, **(kwargs | {name: probe.cache for name in CACHES if name in kwargs}))
    assert probe.kv is not None, "the layer did not write to its cache"
    return probe.kv


def _of_rows(args: tuple[Any, ...], rows: RowIndex) -> tuple[Any, ...]:
    return tuple(value[:, rows] if isinstance(value, torch.Tensor) else value for value in args)


def _arguments_of(kwargs: dict[str, Any], rows: RowIndex) -> dict[str, Any]:
    tables = kwargs["position_embeddings"]
    cut = tables[:, rows] if isinstance(tables, torch.Tensor) else tuple(side[:, rows] for side in tables)
    changed: dict[str, Any] = {"position_embeddings": cut}
    if kwargs.get("position_ids") is not None:
        changed["position_ids"] = kwargs["position_ids"][..., rows]
    return kwargs | changed
