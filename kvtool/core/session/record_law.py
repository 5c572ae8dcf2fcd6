"""Law 6 at the gate: records that another arithmetic has made serve as well as one's own, but for rounding.

What a store keeps does not depend on what computed it, by name; by its numbers it does, as far as bfloat16 and float32
or a processor and a GPU round otherwise. So it is measured on the store's own chunks, and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.identity import ids_digest
from kvtool.core.codec.levels import RAW
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.records.reading import exact_level, read_chunk
from kvtool.core.session.gate import GateCheck
from kvtool.core.session.quoting import nats_a_token, quotation, quoted

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity

LAW = 6
_MOST_CHUNKS, _MOST_TOKENS = 3, 256
_PREFIX = b"prefix"

Chunk = tuple[Ids, ChunkKV]  # token ids and KV of as many
Held = tuple[GateCheck, float]  # how far logits are from each other, and what is lost in nats a token


def chunks_of(
    store: Store, identity: StoreIdentity, made: Arithmetic, chunk_ids: Sequence[bytes], layers: int
) -> list[Chunk]:
    """Some of these chunks that this arithmetic has made, as they are stored without loss; long ones are cut."""
    return list(islice(_chunks_of(store, identity, made, chunk_ids, layers), _MOST_CHUNKS))


def _chunks_of(
    store: Store, identity: StoreIdentity, made: Arithmetic, chunk_ids: Sequence[bytes], layers: int
) -> Iterator[Chunk]:
    for chunk_id in chunk_ids:
        with suppress(DamagedError):
            info, level = store.chunk_info(chunk_id), exact_level(store, chunk_id)
            # One behind a lead-in of its own (`neighbour`, or an earlier one of the store) cannot be made again by it.
            if info and level and (info.arithmetic, info.lead_in) == (made, identity.lead_in.digest()):
                kv = read_chunk(store, chunk_id, level, layers)
                yield info.token_ids[:_MOST_TOKENS], _cut(kv)


def _cut(kv: ChunkKV) -> ChunkKV:
    return ChunkKV(*([side[:, :_MOST_TOKENS] for side in sides] for sides in (kv.keys, kv.values)))


def check_records(
    store: Store, decoder: Decoder, identity: StoreIdentity, made: Arithmetic, chunks: Sequence[Chunk], allowed: float
) -> Held:
    """Hold records that were made in `made` against what this decoder makes of the same chunks.

    The prompt is the chunks, none of them recomputed, and the model is led through their beginnings once more.

    Parameters
    ----------
    allowed : the largest difference of logits that rounding explains.

    Returns
    -------
    See `held`.
    """
    lead_in = LeadIn(decoder, identity.lead_in.ids)
    own = [prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0] for ids, _ in chunks]
    ids, theirs = zip(*chunks, strict=True)
    reference, other = (_rows(decoder, identity.prefix, ids, kvs) for kvs in (own, theirs))
    return held(decoder, f"records made in {made}", reference, other, allowed)


def held(decoder: Decoder, name: str, own: torch.Tensor, theirs: torch.Tensor, allowed: float) -> Held:
    """Hold log-probabilities over what another arithmetic has made against those over one's own.

    Returns
    -------
    How far they are from each other, as RMS of the difference over the spread of one's own, and the loss: KL divergence
    from one's own, in nats, as the mean over tokens.
    """
    spread = (own - own.mean()).square().mean().sqrt().clamp_min(1e-6)
    difference = float((own - theirs).square().mean().sqrt() / spread)
    finite = difference if difference == difference else float("inf")
    return GateCheck(LAW, name, finite, allowed, str(decoder.loaded.arithmetic)), nats_a_token(own, theirs)


def _rows(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> torch.Tensor:
    """Log-probabilities along the quotation behind a prompt of these records."""
    held = {b"%d" % number: kv for number, kv in enumerate(kvs)}
    if prefix:
        held[_PREFIX] = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(prefix)])[0]
    first, script = quotation(chunks)
    candidates = [Candidate(ids, b"%d" % number, level=RAW) for number, ids in enumerate(chunks)]
    start = Candidate(prefix, _PREFIX, ids_digest([]), RAW if prefix else None)
    fused = fuse(decoder, build_plan(start, candidates, (first,)), Reuse(), MemorySource(held), reserve=len(script))
    return quoted(decoder, fused.logits, fused.cache, script)
