"""The laws that the gate checks on a store's own chunks (kvtool/docs/design.md), and how far a model is from each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from kvtool.core.cache.identity import ids_digest
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, shape_of_layer
from kvtool.core.codec.levels import RAW, exact, plugin_of
from kvtool.core.codec.raw import NAMES
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.attention import Rows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.session.gate import GateCheck, GateVerdict, keep_verdict, stored_verdict
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.state_law import check_states

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

_Number = TypeVar("_Number", int, float)
MAX_CHUNKS, MAX_TOKENS = 3, 256
_LOOKED_AT = 8  # of the store's chunks, to find some that can be read
_QUESTION: Ids = (11, 7, 5, 3, 2)  # any ids do: the laws hold for all
SHIFT = 137

# The largest difference that rounding explains: of logits (laws 1 and 3) and of keys (law 4). Measured on the 15 tiny
# families and on SmolLM2-135M; "broken" is the mildest mutant tried, keys or un-rotation one position off.
#            logits: correct        broken        keys: correct   broken
# float32    2e-6                   0.05 … 0.3    2e-6            0.16 … 0.4
# bfloat16   0.02 (SmolLM2: 0.08)   0.05 … 0.3    0.02            0.16 … 0.4
# float16    0.014                  0.07 … 0.3    0.002           0.24
# So in bfloat16 a loader that is one position off can pass law 1 and 3; all other mutants fail one law or another.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
KEY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.05}

# In half precision a rounded router score may choose another expert: a correct mixture of experts differed by 0.29 in
# one prompt of 24. What is broken is broken in every prompt, so the chunks get other turns before the gate refuses.
TURNS = {torch.float32: 1, torch.bfloat16: 3, torch.float16: 3}


def gate_store(
    store: Store, decoder: Decoder, identity: StoreIdentity, chunks: Sequence[Ids] | None = None
) -> GateVerdict | None:
    """The verdict that the store keeps, or a new one; None if there is no chunk to check with.

    Parameters
    ----------
    chunks : token ids of those to check with; None: some of the store's.
    """
    arithmetic = decoder.loaded.arithmetic
    verdict = stored_verdict(store, identity.fingerprint, arithmetic)
    if verdict is not None:
        return verdict
    chunks = _own_chunks(store, identity) if chunks is None else chunks
    if not chunks:
        return None
    verdict = check_laws(decoder, identity.fingerprint, identity.prefix, chunks)
    keep_verdict(store, verdict, arithmetic)
    return verdict


def _own_chunks(store: Store, identity: StoreIdentity) -> list[Ids]:
    chunks = []
    for chunk_id in store.chunk_ids()[:_LOOKED_AT]:
        with contextlib.suppress(DamagedError):
            info = store.chunk_info(chunk_id)
            if info is not None and info.token_ids != identity.prefix:
                chunks.append(info.token_ids)
    return chunks


def check_laws(
    decoder: Decoder, fingerprint: str, prefix: Ids, chunks: Sequence[Ids], question: Ids = _QUESTION
) -> GateVerdict:
    """Check laws 1, 3, 4 and 7 on some chunks (token ids; long ones are cut); of a model that keeps states, law 3.

    The chunks are prefilled here behind the plain prefix, whatever the store's lead-in: so the laws say exactly what
    must come out.
    """
    chunks = [ids[:MAX_TOKENS] for ids in chunks[:MAX_CHUNKS]]
    if decoder.keeps_states:
        tight = TOLERANCE[decoder.dtype], TURNS[decoder.dtype]  # nothing passes through the store's format here
        return check_states(decoder, fingerprint, prefix, chunks, question, *tight)
    bench = _Bench(decoder, prefix, chunks, question)
    everything = max(map(len, chunks))
    logits, turns = _allowed(decoder)
    keys, arithmetic = roughest(KEY_TOLERANCE, decoder), str(decoder.loaded.arithmetic)

    def check(law: int, name: str, allowed: float, measure: Callable[[int], float]) -> GateCheck:
        return GateCheck(law, name, _least(measure, allowed, turns), allowed, arithmetic)

    all_of = len(chunks)
    checks = [
        check(1, "blend 100 %", logits, lambda turn: bench.distance(Blend(ratio=1.0), all_of, turn)),
        check(1, "epic, all tokens", logits, lambda turn: bench.distance(Epic(link_tokens=everything), all_of, turn)),
        check(3, "one chunk behind its lead-in", logits, lambda turn: bench.distance(Reuse(), 1, turn)),
        check(4, f"keys moved by {SHIFT}", keys, bench.shifted),
        GateCheck(7, "lossless levels", bench.lossless(), 0.0, arithmetic),
    ]
    return GateVerdict(fingerprint, tuple(checks))


def roughest(by_dtype: dict[torch.dtype, _Number], decoder: Decoder, *others: torch.dtype) -> _Number:
    """The largest of what belongs to the formats that numbers pass through: that of the arithmetic, and that in which
    keys and values are kept."""
    return max(by_dtype[dtype] for dtype in (decoder.dtype, decoder.kv_dtype, *others))


def _allowed(decoder: Decoder) -> tuple[float, int]:
    """The largest difference of logits that rounding explains, and in how many turns."""
    return roughest(TOLERANCE, decoder), roughest(TURNS, decoder)


def _least(measure: Callable[[int], float], allowed: float, turns: int) -> float:
    """The first difference that is allowed, else the smallest of all turns."""
    found = float("inf")
    for turn in range(turns):
        found = min(found, measure(turn))
        if found <= allowed:
            break
    return found


class _Bench:
    """The chunks, their KV behind the prefix, and the prompt they stand in."""

    def __init__(self, decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> None:
        self._decoder, self._prefix, self._chunks, self._question = decoder, prefix, chunks, question
        lead_in, nothing = LeadIn(decoder, prefix), LeadIn(decoder, ())
        self._references: dict[Ids, torch.Tensor] = {}
        self._kv: dict[bytes, ChunkKV] = {}
        if prefix:
            self._kv[b"prefix"] = prefill_chunks(decoder, nothing, [PrefillItem(prefix)])[0]
        for index, ids in enumerate(chunks):
            self._kv[b"%d" % index] = prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0]

    def distance(self, selector: Selector, count: int, turn: int = 0) -> float:
        """Logits of a mode against full prefill, over a prompt of `count` chunks, beginning with number `turn`."""
        behind = ids_digest(self._prefix)
        order = [(index + turn) % len(self._chunks) for index in range(count)]
        candidates = [Candidate(self._chunks[i], b"%d" % i, behind, RAW) for i in order]
        prefix = Candidate(self._prefix, b"prefix", ids_digest([]), RAW if self._prefix else None)
        plan = build_plan(prefix, candidates, self._question)
        fused = fuse(self._decoder, plan, selector, MemorySource(self._kv))
        return _distance(self._full(tuple(plan.ids)), fused.logits)

    def _full(self, ids: Ids) -> torch.Tensor:
        if ids not in self._references:
            self._references[ids], _ = self._decoder.prefill(ids)
        return self._references[ids]

    def shifted(self, turn: int = 0) -> float:
        """Stored keys moved to positions `SHIFT` later, against a prefill whose position ids are shifted."""
        decoder, number = self._decoder, turn % len(self._chunks)
        chunk = self._chunks[number]
        ids = [*self._prefix, *chunk]
        positions = torch.arange(len(ids))
        cache = decoder.new_cache(len(ids))
        cache.set_length(len(ids))
        with torch.inference_mode():
            moved = _positions(len(ids), SHIFT, decoder)
            decoder.compute(ids, Rows.of(positions, decoder.device), cache, position_ids=moved)
            table = decoder.rotary.table(moved[len(self._prefix) :])
            stored = self._kv[b"%d" % number].keys
            worst = 0.0
            for layer, buffer in enumerate(cache.buffers):
                keys = decoder.rotary.rotate(stored[layer][None].to(decoder.device), table, layer)
                worst = max(worst, _distance(buffer.keys[:, :, len(self._prefix) : len(ids)], keys))
        return worst

    def lossless(self) -> float:
        """0 when every lossless codec gives back what it was given, bit for bit. (A plugin's is held to that whenever
        it writes, and is no reason to refuse a model.)"""
        kv = self._kv[b"0"]
        own = kv.layers[0]
        for codec in (CODECS[level] for level in exact() if plugin_of(level) is None):
            data = b"".join(codec.encode(*own))
            item = Encoded(bytearray(data), shape_of_layer(own), NAMES[kv.dtype])
            sides = codec.decode([item])[0]
            if not all(torch.equal(a, b) for a, b in zip(sides, own, strict=True)):
                return 1.0
        return 0.0


def _positions(count: int, shift: int, decoder: Decoder) -> torch.Tensor:
    return torch.arange(shift, shift + count, device=decoder.device)


def _distance(reference: torch.Tensor, other: torch.Tensor) -> float:
    """RMS of the difference over the reference's own (around its mean); infinite where a number is not finite."""
    if not bool(torch.isfinite(other).all()):
        return float("inf")
    wide = reference.float()
    spread = (wide - wide.mean()).square().mean().sqrt().clamp_min(1e-6)
    return float((wide - other.float()).square().mean().sqrt() / spread)
