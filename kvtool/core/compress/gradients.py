"""Gradients of what a model says with respect to cached keys and values, several prompts in one pass.

Prompts stand side by side in one packed row, as chunks do in a prefill; each sees its own cached keys and values and
its own rows. So weights are read once for all of them, and products have rows enough to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import DynamicCache

from kvtool.core.codec.base import LayerKV, wide_sides
from kvtool.core.common.types import Ids
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.attention import rows_of_pass
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.kinds import LayerKind
from kvtool.core.model.mla import joined
from kvtool.core.model.modules import cache_name


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt whose beginning is cached.

    Attributes
    ----------
    layers : keys, un-rotated, and values of that beginning, `[kv_heads, tokens, head_dim]` each.
    ids : the rest.
    said : how many of its last tokens the model's word is heard on, and on what follows them.
    """

    layers: Sequence[LayerKV]
    ids: Ids
    said: int

    @property
    def cached(self) -> int:
        """Tokens of the cached beginning."""
        return self.layers[0][0].shape[1]


def gradients(decoder: Decoder, prompts: Sequence[Asked], draw: torch.Generator) -> list[torch.Tensor]:
    """The gradients, one a prompt, of the log-chances of tokens drawn from the model's own distribution.

    One token is drawn at each row that is heard: the mean of the outer products over draws is the Fisher information.

    Returns
    -------
    For each prompt float32 `[layers, 2, tokens, C]`, C = `decoder.channels`: of un-rotated keys and of values.
    """
    tables = [decoder.rotary.table(torch.arange(prompt.cached, device=decoder.device)) for prompt in prompts]
    leaves = [_leaves(decoder, prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    rows = _Rows.of(prompts, leaves, decoder.kinds)
    with torch.enable_grad():
        logits = _logits(decoder, prompts, rows)
        wanted = [side for prompt in leaves for layer in prompt for side in layer]
        found = torch.autograd.grad(logits, wanted, _pull(logits.detach(), draw))
    layers = decoder.stored_layers
    parts = [found[first : first + 2 * layers] for first in range(0, len(found), 2 * layers)]
    return [_unrotated(decoder, part, table) for part, table in zip(parts, tables, strict=True)]


@contextmanager
def without_weight_gradients(decoder: Decoder) -> Iterator[None]:
    """Let gradients reach keys and values only; afterwards weights ask for theirs as before."""
    wanted = [(weight, weight.requires_grad) for weight in decoder.model.parameters()]
    decoder.model.requires_grad_(False)
    try:
        yield
    finally:
        for weight, before in wanted:
            weight.requires_grad_(before)


def _leaves(decoder: Decoder, prompt: Asked, table: RopeTables) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys, rotated, and values of each layer `[kv_heads, tokens, head_dim]`, in the model's dtype."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, (keys, values) in enumerate(prompt.layers):
        placed = decoder.rotary.rotate(keys[None].to(decoder.device), table, layer)[0]
        placed, values = (side.to(decoder.device, decoder.dtype).detach().clone() for side in (placed, values))
        made.append((placed.requires_grad_(), values.requires_grad_()))
    return made


def _logits(decoder: Decoder, prompts: Sequence[Asked], rows: _Rows) -> torch.Tensor:
    """float32 `[rows, vocabulary]`: at the rows before and on each of the said tokens."""
    device = decoder.device
    positions = [torch.arange(prompt.cached, prompt.cached + len(prompt.ids)) for prompt in prompts]
    kept = [torch.arange(stop - prompt.said - 1, stop) for (_, stop), prompt in zip(rows.spans, prompts, strict=True)]
    with rows_of_pass(lambda: rows):
        out = decoder.model(
            torch.tensor([[token for prompt in prompts for token in prompt.ids]], device=device),
            position_ids=torch.cat(positions)[None].to(device),
            use_cache=True,
            logits_to_keep=torch.cat(kept).to(device),
            rows=rows,
            **{cache_name(decoder.base): DynamicCache()},
        )
    logits: torch.Tensor = out.logits[0].float()
    return logits


def _pull(logits: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """The gradient, with respect to the logits, of the log-chances of tokens drawn from them."""
    chances = torch.softmax(logits, -1)
    lot = torch.rand((len(chances), 1), generator=draw, dtype=torch.float32).to(chances)
    said = torch.searchsorted(chances.cumsum(-1), lot).clamp_max_(chances.shape[-1] - 1)
    return (-chances).scatter_add_(1, said, torch.ones_like(lot))


def _unrotated(decoder: Decoder, found: Sequence[torch.Tensor], table: RopeTables) -> torch.Tensor:
    """Gradients of keys as they are before rotation: what a rotation's transpose makes of them."""
    back = table.transposed()
    sides = []
    for layer in range(decoder.stored_layers):
        keys, values = (side.float() for side in found[2 * layer : 2 * layer + 2])
        keys = decoder.rotary.rotate(keys[None], back, layer)[0]
        sides.append(wide_sides((keys, values), decoder.channels))
    return torch.stack(sides)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Attends for prompts side by side, each over its own cached keys and values; gradients pass."""

    spans: tuple[tuple[int, int], ...]
    cached: Sequence[Sequence[LayerKV]]
    sources: Sequence[int]

    @classmethod
    def of(cls, prompts: Sequence[Asked], cached: Sequence[Sequence[LayerKV]], kinds: Sequence[LayerKind]) -> _Rows:
        stops = list(accumulate(len(prompt.ids) for prompt in prompts))
        sources = [layer if kind.source is None else kind.source for layer, kind in enumerate(kinds)]
        return cls(tuple(zip([0, *stops[:-1]], stops, strict=True)), cached, sources)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: AttentionParams
    ) -> torch.Tensor:
        """Fulfil `AttentionRows`, by plain products."""
        parts = []
        for (start, stop), cached in zip(self.spans, self.cached, strict=True):
            before, values = cached[self.sources[layer]]
            if before.shape[2] != key.shape[3]:
                before = joined(values, before)
            keys = torch.cat([before, key[0, :, start:stop]], 1)
            values = torch.cat([values, value[0, :, start:stop]], 1)
            parts.append(_attended(query[0, :, start:stop], keys, values, scoring))
        return torch.cat(parts, 1)[None]


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: AttentionParams) -> torch.Tensor:
    """Attend with the last rows of a causal attention, `[heads, rows, head_dim]`; keys and values of fewer heads."""
    heads, rows, _ = query.shape
    kv_heads, seen = keys.shape[:2]
    weights = attention_weights(
        query, keys, KeyRanges.run(range(seen - rows, seen), scoring.window, query.device), scoring
    )
    return torch.bmm(weights.to(values.dtype).view(kv_heads, -1, seen), values).view(heads, rows, -1)
