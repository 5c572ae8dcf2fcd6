"""A model with the modules that vLLM gives a family, made of a model of `transformers`, with paged caches; and prompts.

vLLM itself needs an environment of its own (test_vllm.py); what kvtool does with its modules needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvtool.core.cache.store import Store

BLOCK, BLOCKS = 16, 64  # tokens of a block, and how many there are


class Joined(nn.Module):
    """Projections as one, which returns its output and a bias that it has added already."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat([part(hidden) for part in self.parts], -1), None


class Rope(nn.Module):
    """RoPE by a table of cos and sin; it rotates in place, as vLLM's kernels do."""

    is_neox_style = True

    def __init__(self, own: Any, kind: str | None, head_dim: int) -> None:
        super().__init__()
        positions = torch.arange(2048)[None]
        like = torch.zeros(1, dtype=torch.float32)
        cos, sin = own(like, positions, kind) if kind else own(like, positions)
        self.head_dim = head_dim
        self.cos_sin_cache = torch.cat([side[0, :, : head_dim // 2] for side in (cos, sin)], -1)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, -1)
        for side in (query, key):
            heads = side.view(len(positions), -1, self.head_dim)
            first, second = (half.clone() for half in heads.chunk(2, -1))
            heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
        return query, key


class Paged:
    """Attention with a paged cache, whose keys are stored transposed within a block."""

    kv_sharing_target_layer_name = None
    sinks = alibi_slopes = None

    def __init__(self, scale: float, window: int | None, cap: float | None, heads: int, head_dim: int) -> None:
        self.scale, self.sliding_window, self.logits_soft_cap, self.impl = scale, window, cap, self
        self.kv_cache = torch.full((BLOCKS, heads, 2, head_dim * BLOCK), torch.nan)

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        blocks, heads, _, numbers = cache.shape
        by_column, by_row = (
            cache[:, :, 0].view(blocks, heads, numbers // BLOCK, BLOCK),
            cache[:, :, 1].view(blocks, heads, BLOCK, numbers // BLOCK),
        )
        by_column[slots // BLOCK, :, :, slots % BLOCK] = keys
        by_row[slots // BLOCK, :, slots % BLOCK] = values

    def rows(self, blocks: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[heads, count, head_dim]` of a request's first tokens."""
        keys, values = self.kv_cache[list(blocks)].unbind(2)
        heads, width = keys.shape[1], keys.shape[2] // BLOCK
        by_row = keys.view(-1, heads, width, BLOCK).transpose(2, 3), values.view(-1, heads, BLOCK, width)
        keys, values = (side.transpose(0, 1).reshape(heads, -1, width)[:, :count] for side in by_row)
        return keys, values


class Attention(nn.Module):
    def __init__(self, own: Any, config: Any, rope: Rope) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = (
            own.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.qkv_proj, self.o_proj = Joined(own.q_proj, own.k_proj, own.v_proj), Joined(own.o_proj)
        if hasattr(own, "q_norm"):
            self.q_norm, self.k_norm = own.q_norm, own.k_norm
        window = own.sliding_window if hasattr(own, "sliding_window") else getattr(config, "sliding_window", None)
        cap = getattr(config, "attn_logit_softcapping", None)
        self.rotary_emb, self.attn = rope, Paged(own.scaling, window, cap, self.num_kv_heads, self.head_dim)


class Layer(nn.Module):
    def __init__(self, own: Any, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        for name, module in own.named_children():
            if name != "self_attn":
                setattr(self, name, module)


class Base(nn.Module):
    def __init__(self, own: Any, config: Any) -> None:
        super().__init__()
        self.embed_tokens, self.norm = own.embed_tokens, own.norm
        kinds = config.layer_types if isinstance(next(iter(config.rope_parameters.values())), dict) else None
        head_dim = own.layers[0].self_attn.head_dim
        ropes = {kind: Rope(own.rotary_emb, kind, head_dim) for kind in set(kinds or [None])}
        pairs = zip(own.layers, kinds or [None] * len(own.layers), strict=True)
        self.layers = nn.ModuleList(Layer(one, Attention(one.self_attn, config, ropes[kind])) for one, kind in pairs)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(ids)
        return embedded


class Imitation(nn.Module):
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.model = own, Base(own.model, own.config)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.own.lm_head(hidden)
        cap = getattr(self.own.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.inference_mode()
    def serve(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        cache = self.own(input_ids=torch.tensor([list(ids)]), use_cache=True, past_key_values=None).past_key_values
        places = torch.arange(len(ids))
        slots = torch.tensor(blocks)[places // BLOCK] * BLOCK + places % BLOCK
        for layer, kept in zip(self.model.layers, cache.layers, strict=True):
            keys, values = (side[0].transpose(0, 1) for side in (kept.keys, kept.values))
            layer.self_attn.attn.do_kv_cache_update(None, keys, values, layer.self_attn.attn.kv_cache, slots)


OWN, QUESTION = (70, 71, 72, 73, 74, 75, 76), (90, 91, 92, 93, 94)  # any ids do: nothing decodes them


def prompt_of(store: Path, first: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Three chunks from number `first` on, the last one cut, and a question; and where the chunks are."""
    with Store.open(store) as opened:
        infos = [opened.chunk_info(ref.chunk_id) for one in opened.documents() for ref in one.chunks]
    chunks = [info.token_ids for info in infos if info is not None and len(info.token_ids) >= 32][first : first + 3]
    chunks[-1] = chunks[-1][:-4]
    ids, places = list[int](), list[tuple[int, int]]()
    for chunk in chunks:
        ids += OWN
        places.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return [*ids, *QUESTION], places
