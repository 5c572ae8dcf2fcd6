"""Modules of a model of `transformers`: found by what their code calls, run only up to their attention, or, where they
expand latents, made to attend to these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Literal

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import KV, AttentionParams, KeyRanges
from kvtool.core.model.forward import AttentionRows, Pass, QueryRows

# What models and layers call the cache that they are given: `transformers` up to 5.23, and since 5.24; BLOOM's layers.
CACHES = ("past_key_values", "cache", "layer_past")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
HINT = "use a causal language model with ordinary rotary attention"


def base_of(model: Any) -> Any:
    base = model.get_decoder()
    return base.model if base is model and hasattr(model, "model") else base


def layers_of(base: Any) -> list[Any]:
    layers = getattr(base, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(base).__name__} has no stack of decoder layers; that would need another way to run them one by one",
            HINT,
        )
    return list(layers)


def attentions_of(layers: Sequence[Any], in_some: bool) -> dict[int, Any]:
    """Find the attention modules of layers, by layer; `in_some`: there may be layers without any."""
    attentions: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        modules = [child for child in layer.children() if _is_attention(child)]
        if len(modules) > 1 or not (modules or in_some):
            several = "several attentions in a layer; that would need keys and values stored for each"
            odd = "attention of its own, which takes no rows of others; that would need our rows and masks given to it"
            raise ModelError(f"{type(layer).__name__} has {several if modules else odd}", HINT)
        if modules:
            attentions[number] = modules[0]
    return attentions


def disable_query_scaling(attentions: Sequence[Any]) -> None:
    """Keep attention modules from scaling queries by the cache's length (Llama 4), which rows of ours do not follow. In
    prompts up to `context_limit` every scale is one."""
    for attention in attentions:
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False


def _is_attention(module: Any) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def cache_name(module: Any) -> str:
    return _cache_name(type(module).forward)


@functools.cache
def _cache_name(forward: Any) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in parameters), CACHES[0])


class ForwardEnded(Exception):
    """Ends a forward before its end: what is left of it would be computed for nothing."""


class CacheProxy:
    """A cache without rows: `update` takes a layer's new keys and values, `[batch, kv_heads, rows, head_dim]`, and its
    number, and returns those to attend to.
    """

    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor, int], KV]) -> None:
        self._update = update
        self.layers: list[Any] = []

    is_compileable = False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        return self._update(key_states, value_states, layer_idx)


class LayerProbe:
    """A run of one layer up to its cache, or up to its attention, of which it takes the place as `AttentionRows`."""

    def __init__(self, until: Literal["cache", "attention"]) -> None:
        self._until = until
        self.cache = CacheProxy(self._written)  # to be given to the layer
        self.kv: KV | None = None  # what it writes to its cache
        self.attention: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams] | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with suppress(ForwardEnded):
            forward(*args, **kwargs)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.attention = query, key, value, params
        raise ForwardEnded

    def _written(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KV:
        self.kv = key, value
        if self._until == "cache":
            raise ForwardEnded
        return self.kv


# ---- latents: multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1) ------------------------
#
# A token's cache is one latent, of which every head makes its key and its value, and one key that carries the position.
# A model's own forward makes the keys and values of all tokens again for each of its passes. Here queries are brought
# to the latents instead (the section's closing remark): q · (K c) = (Kᵀ q) · c, and the result of attention, a mean of
# latents, is multiplied by V afterwards. So it is attention over a single head whose key is latent and rotary key side
# by side, and whose value is the latent. Where many rows see many keys, heads of their own take fewer operations, and
# are made for the one pass. A module is known by its parts: it expands latents itself (`expand_kv`), by one product
# (`kv_b_proj`).

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")


class Latents:
    """How one attention module attends over a cache of latents, wherever `implementation` computes its attention. Its
    `forward` and `expand_kv` take the place of the module's own."""

    def __init__(self, attention: Any, implementation: str) -> None:
        self.attention, self._implementation = attention, implementation
        self._own_forward, self._own_expand_kv = attention.forward, attention.expand_kv
        sizes = [getattr(attention, name, None) for name in _SIZES]
        if not all(isinstance(size, int) for size in sizes) or getattr(attention.kv_b_proj, "bias", None) is not None:
            needed = f"that would need one product without a bias, and {', '.join(_SIZES)} stated by the module"
            raise ModelError(
                f"{type(attention).__name__} expands its latents in a way that is not known here; {needed}",
                "this family is not known to kvtool; use another model",
            )
        self.rank, self.plain, self.rotary, self.value, self.heads = (int(size) for size in sizes if size is not None)

    @property
    def serves(self) -> bool:
        return bool(self.attention.config._attn_implementation == self._implementation)

    def should_expand(self, rows: int, keys: int, pairs: int) -> bool:
        """Return True if expanding keys and values takes fewer multiplications than absorbed queries: many rows see
        many keys. `pairs`: of a row and a key that it sees. Measured: samples/results/speed.md."""
        both = self.rank * (self.plain + self.value)  # of a key's expansion, or a row's ways there and back
        narrow, wide = self.plain + self.rotary + self.value, 2 * self.rank + self.rotary
        return keys * both + pairs * narrow < rows * both + pairs * wide

    def heads_of(self, joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make keys and values of every head, `[1, heads, keys, …]`, as the module does, of latents and rotary keys."""
        sides: tuple[torch.Tensor, torch.Tensor] = self._own_expand_kv(*joint.split([self.rank, self.rotary], -1))
        return sides

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Bring queries `[1, heads, rows, plain + rotary]` to the single head: `[1, heads, rows, rank + rotary]`."""
        plain, turned = query.split([self.plain, self.rotary], -1)
        return torch.cat([torch.matmul(plain, self._weights[0]), turned], -1)

    def unfolded(self, mixed: torch.Tensor) -> torch.Tensor:
        """Make each head's values `[1, heads, rows, value]` of mixed latents `[1, heads, rows, rank]`."""
        return torch.matmul(mixed, self._weights[1])

    @property
    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        product = self.attention.kv_b_proj
        if type(product) is torch.nn.Linear and "forward" not in vars(product):
            return self._cut(product.weight)
        return self._unpacked

    @cached_property
    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of a product with a layout of its own: what it makes of the unit vectors."""
        product = self.attention.kv_b_proj
        like = self.attention.kv_a_layernorm.weight
        with torch.inference_mode(False), torch.no_grad():
            units = torch.eye(self.rank, dtype=like.dtype, device=like.device)
            return self._cut(product(units).T.contiguous())

    def _cut(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = weight.view(self.heads, self.plain + self.value, self.rank).split([self.plain, self.value], 1)
        return keys, values.transpose(1, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = cache_name(self.attention)
        if self.serves and kwargs.get(name) is not None:
            kwargs[name] = _latents_first(kwargs[name])
        return self._own_forward(*args, **kwargs)

    def expand_kv(self, latents: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value of the single head; `keys` may have the latents before them already."""
        sides: tuple[torch.Tensor, torch.Tensor]
        sides = (joined(latents, keys), latents) if self.serves else self._own_expand_kv(latents, keys)
        return sides


def _latents_first(cache: Any) -> CacheProxy:
    """Return a cache as the module writes to it: latents first, where ours has the rotary keys as keys."""

    def update(latents: torch.Tensor, keys: torch.Tensor, layer: int) -> KV:
        keys, values = cache.update(keys, latents, layer)
        return values, keys

    return CacheProxy(update)


def joined(latents: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    width = latents.shape[-1]
    is_joined = keys.shape[-1] > width and keys.data_ptr() == latents.data_ptr()
    return keys if is_joined else torch.cat([latents, keys], -1)


def attend_latents(attentions: Sequence[Any], implementation: str) -> None:
    """Let those modules that expand latents attend to the latents themselves, wherever `implementation` attends."""
    for attention in attentions:
        if hasattr(attention, "expand_kv") and hasattr(attention, "kv_b_proj") and latents_of(attention) is None:
            latents = Latents(attention, implementation)
            attention.forward, attention.expand_kv, attention._latents = latents.forward, latents.expand_kv, latents


def latents_of(attention: Any) -> Latents | None:
    """Return what a module attends to latents by; None: it keeps no latents."""
    latents: Latents | None = vars(attention).get("_latents")
    return latents


IMPLEMENTATION = "kvtool_rows"
_running: ContextVar[Pass | None] = ContextVar("running_pass", default=None)


@contextmanager
def running(job: Pass) -> Iterator[None]:
    """Set the pass that a model computes inside: its layers do not hand it on to their attention."""
    token = _running.set(job)
    try:
        yield
    finally:
        _running.reset(token)


def is_running(job: Pass) -> bool:
    return _running.get() is job


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: AttentionRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for `transformers`' attention interface, `[batch, rows, heads, head_dim]`. Without `rows`,
    those of the running pass decide what is seen; without any, it is a causal prefill. `kwargs` has `sliding_window`,
    `softcap` and `s_aux` (sinks), where a layer has them."""
    if kwargs.get("position_bias") is not None:
        needed = "that would need the bias made for chosen rows"
        raise ModelError(f"attention adds a position_bias; {needed}", "use a model with plain rotary attention")
    latents = latents_of(module)
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    job = _running.get() if rows is None else None
    rows = rows if job is None else job.rows
    if (
        latents is not None
        and isinstance(rows, QueryRows)
        and latents.should_expand(len(rows), key.shape[2], rows.pairs)
    ):
        (key, value), latents = latents.heads_of(key), None
    if latents is not None:
        query = latents.absorbed(query)
    if job is not None and job.on_layer.attend(module.layer_idx, query, key, value, params):
        raise ForwardEnded
    if rows is not None:
        out = rows.attend(module.layer_idx, query, key, value, params)
    elif key.shape[2] == query.shape[2]:
        out = attend(query, key, value, params, KeyRanges.run(range(key.shape[2]), params.window, query.device))
    else:
        raise ModelError("rows over a longer cache need their positions", "this is a bug in kvtool")
    if latents is not None:
        out = latents.unfolded(out)
    return out.transpose(1, 2).contiguous(), None
