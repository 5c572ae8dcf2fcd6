"""How much a token's values depend on what stood before its chunk: side data that `union` ranks rows by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.lead_in import lead_in_ids
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt import PromptParts

# The first layer whose values can differ at all. Further layers rank tokens hardly better (answer KL .084 instead of
# .087), and each would cost another L-th of an ingest.
LAYER = 1
_LARGEST = torch.finfo(torch.float16).max


def other_lead_in(decoder: Decoder, parts: PromptParts, own: Ids, shared: bool) -> LeadIn:
    """Make the lead-in that chunks are compared behind: what counts is how far a text before a chunk moves its values.

    It is the plain prefix for a store whose chunks all stand behind a text of their own (`warm`, a file), and the warm
    one for all others.

    Parameters
    ----------
    own : ids of the store's lead-in.
    shared : whether nothing else stands before its chunks.
    """
    plain, warm = (lead_in_ids(mode, decoder.loaded.tokenizer, parts) for mode in ("prefix", "warm"))
    return LeadIn(decoder, plain if shared and len(own) > len(plain) else warm)


def sensitivities(decoder: Decoder, other: LeadIn, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> list[bytes]:
    """Measure for each chunk, as one little-endian float16 a token, the distance of its values at layer 1 (layer 0 of a
    model with one layer), over all heads, between its own lead-in and the other one.

    Parameters
    ----------
    chunks : token ids.
    kvs : the same chunks behind their own lead-in.
    """
    layer = min(LAYER, decoder.stored_layers - 1)
    others = prefill_chunks(decoder, other, [PrefillItem(ids) for ids in chunks], layer + 1)
    return [_distance(kv.values[layer], moved.values[layer]) for kv, moved in zip(kvs, others, strict=True)]


def _distance(values: torch.Tensor, moved: torch.Tensor) -> bytes:
    """Measure the distance, token by token, of values `[kv_heads, tokens, head_dim]`."""
    distance = (values.float() - moved.float()).square().sum((0, 2)).sqrt().clamp_max(_LARGEST)
    return distance.half().numpy().astype("<f2").tobytes()
