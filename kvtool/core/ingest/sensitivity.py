"""How much a token's values depend on what stood before its chunk: side data that `union` ranks rows by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.model.decoder import Decoder
from kvtool.core.model.lead_in import lead_in_ids
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt import PromptParts
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity

# Of the first layer whose values can differ at all. Further layers rank tokens hardly better (answer KL .084 instead of
# .087, PAPERS "Measured here"), and each would cost another L-th of an ingest.
LAYER = 1
_LARGEST = torch.finfo(torch.float16).max


class Sensitivity:
    """Compares chunks with a prefill of their first layers behind another lead-in.

    The other lead-in is the plain prefix for a store whose chunks stand behind a text of their own (`warm`, a file),
    and the warm one for all others: what counts is how far a text before the chunk moves its values.
    """

    def __init__(self, decoder: Decoder, identity: StoreIdentity) -> None:
        self._decoder = decoder
        parts = PromptParts(identity.prefix, identity.answer_header)
        plain = lead_in_ids("prefix", decoder.loaded.tokenizer, parts)
        warm = lead_in_ids("warm", decoder.loaded.tokenizer, parts)
        led = identity.lead_in
        self._ids = plain if led.mode != NEIGHBOUR and len(led.ids) > len(plain) else warm
        self._lead_in: LeadIn | None = None

    def of(self, chunks: Sequence[Sequence[int]], kvs: Sequence[ChunkKV]) -> list[bytes]:
        """For each chunk one little-endian float16 a token: the distance of its values at layer 1 (layer 0 of a model
        with one layer), over all heads, between its own lead-in and the other one.

        Parameters
        ----------
        chunks : token ids.
        kvs : the same chunks behind their own lead-in.
        """
        if self._lead_in is None:
            self._lead_in = LeadIn(self._decoder, self._ids)
        layer = min(LAYER, len(self._decoder.layers) - 1)
        others = prefill_chunks(self._decoder, self._lead_in, [PrefillItem(tuple(ids)) for ids in chunks], layer + 1)
        return [_distance(kv.values[layer], other.values[layer]) for kv, other in zip(kvs, others, strict=True)]


def _distance(one: torch.Tensor, other: torch.Tensor) -> bytes:
    """Of values `[kv_heads, tokens, head_dim]`, token by token."""
    distance = (one.float() - other.float()).square().sum((0, 2)).sqrt().clamp_max(_LARGEST)
    return distance.half().numpy().astype("<f2").tobytes()
