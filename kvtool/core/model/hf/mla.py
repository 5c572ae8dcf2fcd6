"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.params import KV
from kvtool.core.model.hf.modules import CacheProxy, cache_name

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
