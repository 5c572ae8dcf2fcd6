"""What keys and values chunks have in a real prompt: the target of a learned lead-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder

# A lead-in matters most to a chunk's first tokens: the later ones see more of their own chunk.
TARGET_TOKENS = 96


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Holds a chunk's beginning, and its un-rotated keys and values `[layers, kv_heads, len(ids), head_dim]` behind
    the prompt's beginning and other chunks."""

    ids: Ids
    keys: torch.Tensor
    values: torch.Tensor


def targets(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids]) -> list[Target]:
    """Prefill a prompt of these chunks, which gives a target for each but the first: that has none before it."""
    ids = [*prefix, *(token for chunk in chunks for token in chunk)]
    _, cache = decoder.prefill(ids)
    undo = decoder.rotary.table(torch.arange(len(ids), device=decoder.device)).inverse()
    made, start = [], len(prefix) + len(chunks[0])
    for chunk in chunks[1:]:
        span = slice(start, start + min(len(chunk), TARGET_TOKENS))
        sides = [buffer.view() for buffer in cache.buffers]
        keys = [decoder.rotary.rotate(k[:, :, span], undo[span], n)[0] for n, (k, _) in enumerate(sides)]
        values = [v[0, :, span] for _, v in sides]
        made.append(Target(chunk[:TARGET_TOKENS], torch.stack(keys), torch.stack(values)))
        start += len(chunk)
    return made


def variances(made: Sequence[Target]) -> torch.Tensor:
    """Measure the variance over tokens of keys and of values, float32 `[2, layers]`, mean over channels and targets."""
    sides = [
        torch.stack([side.float().var(2).mean((1, 2)) for side in (target.keys, target.values)]) for target in made
    ]
    return torch.stack(sides).mean(0).clamp_min(1e-12)
