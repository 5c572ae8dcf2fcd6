"""Heavy hitters: the rows of a chunk worth storing when not all are, ranked by attention that reads the chunk again.

A chunk is prefilled once more with its own tokens after it, as if someone repeated it word for word. A row's worth is
the largest weight that any head gives it then, the mean over the layers (KVzip, arXiv 2505.23416, there for each head).
Other rules lose more (`kvtool help codec`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.common.types import Ids
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks

SINKS = 4  # first rows of a chunk, which always stay: its later rows lean on them
_BLOCK = 64  # rows whose weights exist at a time
_TWICE = "each chunk is read twice to choose its rows: leave --keep out, or ingest with fewer --chunk-tokens"


class _Watch:
    """Sum over layers (`worth`, float32 `[tokens]`) of the largest weight a chunk's rows get from its repetition."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.worth = torch.zeros(tokens, dtype=torch.float32)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        """Look at a layer's queries `[heads, 2 · tokens, head_dim]` and at all keys that the last of them sees."""
        tokens, keys = self._tokens, key.shape[1]
        before = keys - 2 * tokens
        most = torch.zeros(tokens, device=key.device, dtype=torch.float32)
        for start in range(tokens, 2 * tokens, _BLOCK):
            stop = min(start + _BLOCK, 2 * tokens)
            seen = KeyRanges.run(range(before + start, before + stop), scoring.window, key.device)
            weights = attention_weights(query[:, start:stop], key, seen, scoring)
            most = torch.maximum(most, weights[:, :, before : before + tokens].amax((0, 1)))
        self.worth += most.cpu()


def repeated(decoder: Decoder, lead_in: LeadIn, chunks: Sequence[Ids]) -> list[torch.Tensor]:
    """Measure the worth of each row of some chunks, float32 `[tokens]`, without the text before them that a `neighbour`
    store has. Raises UsageError: a chunk and its repetition are longer than the model's context."""
    decoder.check_length(len(lead_in) + 2 * max(map(len, chunks), default=0), _TWICE)
    watches = [_Watch(len(ids)) for ids in chunks]
    prefill_chunks(decoder, lead_in, [PrefillItem((*ids, *ids)) for ids in chunks], watches=watches)
    return [watch.worth for watch in watches]


def heaviest(worth: torch.Tensor, share: int) -> Ids:
    """Choose `share` percent of the rows, ascending: the first ones, and of the others those of the highest worth."""
    tokens = len(worth)
    ranked = worth.clone()
    ranked[:SINKS] = torch.inf
    count = min(tokens, max(SINKS, -(-tokens * share // 100)))
    chosen = ranked.argsort(descending=True, stable=True)[:count]
    return tuple(chosen.sort().values.tolist())
