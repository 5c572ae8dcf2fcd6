"""Measure how far a model is from the laws of kvtool/docs/design.md, on a store's own chunks.

A model meets the laws when it first meets a store. Law 6, that records and states of another arithmetic serve as well
as one's own, is measured when such are first used: what a store keeps does not depend on what computed it by name, but
it does by rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.stretches import Place
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, Encoded, shape_of_layer
from kvtool.core.codec.levels import RAW, exact, plugin_of
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.prefix_cache import fuse_prefix
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import MemorySource
from kvtool.core.fusion.state_checkpoint import ReadPart, StoredPrefix, encode_part
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.records.read import exact_level, read_chunk
from kvtool.core.session.gate import ConformanceCheck, ConformanceResult, keep_result, stored_result
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

_Number = TypeVar("_Number", int, float)
MAX_CHUNKS, MAX_TOKENS = 3, 256
_MAX_PREFIX_TOKENS = 768  # of a stored prefix whose states are compared: no state can be cut
_COPIED = 32  # first tokens of each chunk that the copy task is made of
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
) -> ConformanceResult | None:
    """Return the result that the store keeps, or measure and keep one; None if there is no chunk to check with.

    Parameters
    ----------
    chunks : token ids of those to check with; None: some of the store's.
    """
    arithmetic = decoder.loaded.arithmetic
    result = stored_result(store, identity.fingerprint, arithmetic)
    if result is not None:
        return result
    chunks = _own_chunks(store, identity) if chunks is None else chunks
    if not chunks:
        return None
    result = check_laws(decoder, identity.fingerprint, identity.prefix, chunks)
    keep_result(store, result, arithmetic)
    return result


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
) -> ConformanceResult:
    """Check laws 1, 3, 4 and 7 on some chunks (token ids; long ones are cut); of a model that keeps states, law 3.

    The chunks are prefilled here behind the plain prefix, whatever the store's lead-in: so the laws say exactly what
    must come out.
    """
    chunks = [ids[:MAX_TOKENS] for ids in chunks[:MAX_CHUNKS]]
    arithmetic = str(decoder.loaded.arithmetic)
    if decoder.keeps_states:  # nothing passes through the store's format here
        allowed, turns = TOLERANCE[decoder.dtype], TURNS[decoder.dtype]
        off = _least(lambda turn: _states_off(decoder, prefix, _turned(chunks, turn), question), allowed, turns)
        check = ConformanceCheck(3, "a question behind a stored beginning", off, allowed, arithmetic)
        return ConformanceResult(fingerprint, (check,))
    bench = _Bench(decoder, prefix, chunks, question)
    everything = max(map(len, chunks))
    logits, turns = _roughest(TOLERANCE, decoder), _roughest(TURNS, decoder)
    keys = _roughest(KEY_TOLERANCE, decoder)

    def check_of(law: int, name: str, allowed: float, measure: Callable[[int], float]) -> ConformanceCheck:
        return ConformanceCheck(law, name, _least(measure, allowed, turns), allowed, arithmetic)

    all_of = len(chunks)
    checks = [
        check_of(1, "blend 100 %", logits, lambda turn: bench.distance(Blend(ratio=1.0), all_of, turn)),
        check_of(1, "epic, all tokens", logits, lambda turn: bench.distance(Epic(everything), all_of, turn)),
        check_of(3, "one chunk behind its lead-in", logits, lambda turn: bench.distance(Reuse(), 1, turn)),
        check_of(4, f"keys moved by {SHIFT}", keys, bench.shifted),
        ConformanceCheck(7, "lossless levels", bench.lossless(), 0.0, arithmetic),
    ]
    return ConformanceResult(fingerprint, tuple(checks))


def _roughest(by_dtype: dict[torch.dtype, _Number], decoder: Decoder, *others: torch.dtype) -> _Number:
    """The largest of what belongs to the formats that numbers pass through: that of the arithmetic, and that in which
    keys and values are kept."""
    return max(by_dtype[dtype] for dtype in (decoder.dtype, decoder.kv_dtype, *others))


def _turned(chunks: Sequence[Ids], turn: int) -> list[Ids]:
    return [chunks[(index + turn) % len(chunks)] for index in range(len(chunks))]


def _least(measure: Callable[[int], float], allowed: float, turns: int) -> float:
    """The first difference that is allowed, else the smallest of all turns."""
    found = float("inf")
    for turn in range(turns):
        found = min(found, measure(turn))
        if found <= allowed:
            break
    return found


def _distance(reference: torch.Tensor, other: torch.Tensor) -> float:
    """RMS of the difference over the reference's own (around its mean); infinite where a number is not finite."""
    if not bool(torch.isfinite(other).all()):
        return float("inf")
    wide = reference.double()
    spread = (wide - wide.mean()).square().mean().sqrt().clamp_min(1e-6)
    return float((wide - other.double()).square().mean().sqrt() / spread)


class _Bench:
    """The chunks, their KV behind the prefix, and the prompt that they make."""

    def __init__(self, decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> None:
        self._decoder, self._prefix, self._chunks, self._question = decoder, prefix, chunks, question
        self._references: dict[Ids, torch.Tensor] = {}
        lead_in = LeadIn(decoder, prefix)
        kvs = [prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0] for ids in chunks]
        self._kv = _by_id(decoder, prefix, kvs)

    def distance(self, selector: Selector, count: int, turn: int = 0) -> float:
        """Logits of a mode against full prefill, over a prompt of `count` chunks, beginning with number `turn`."""
        order = [(index + turn) % len(self._chunks) for index in range(count)]
        chunks = {b"%d" % number: self._chunks[number] for number in order}
        plan = _plan(self._prefix, chunks, self._question, ids_digest(self._prefix))
        fused = fuse(self._decoder, plan, selector, MemorySource(self._kv))
        return _distance(self._full(tuple(plan.ids)), fused.logits)

    def _full(self, ids: Ids) -> torch.Tensor:
        if ids not in self._references:
            self._references[ids], _ = self._decoder.prefill(ids)
        return self._references[ids]

    def shifted(self, turn: int = 0) -> float:
        """Stored keys moved to positions `SHIFT` later, against a prefill whose position ids are shifted."""
        decoder, number = self._decoder, turn % len(self._chunks)
        ids = [*self._prefix, *self._chunks[number]]
        cache = decoder.new_cache(len(ids))
        cache.set_length(len(ids))
        with torch.inference_mode():
            moved = torch.arange(SHIFT, SHIFT + len(ids), device=decoder.device)
            decoder.compute(ids, QueryRows.of(torch.arange(len(ids)), decoder.device), cache, position_ids=moved)
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


def _by_id(decoder: Decoder, prefix: Ids, kvs: Sequence[ChunkKV]) -> dict[bytes, ChunkKV]:
    """KV of chunks by their number, and of the prompt's own beginning."""
    found = {b"%d" % number: kv for number, kv in enumerate(kvs)}
    if prefix:
        found[b"prefix"] = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(prefix)])[0]
    return found


def _plan(prefix: Ids, chunks: dict[bytes, Ids], question: Ids, lead_in: bytes = b"") -> Plan:
    """A prompt of stored chunks, by id."""
    candidates = [Candidate(ids, chunk, lead_in, RAW) for chunk, ids in chunks.items()]
    return build_plan(Candidate(prefix, b"prefix", ids_digest([]), RAW if prefix else None), candidates, question)


def _states_off(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> float:
    """Answer a prompt, store its beginning as bytes, read it back; return how far the logits behind it are from full
    prefill's. Models differ in whether their forward goes on from a state with several tokens at once; some begin anew
    without a word."""
    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], question)
    full, _ = decoder.prefill(plan.ids)
    names = tuple(b"%d" % number for number in range(len(plan.segments) - 1))
    first = fuse_prefix(decoder, plan, Prefix(), StoredPrefix(names, (None,) * len(names)), _nothing)
    stored = {(one.id, place): encode_part(tensors) for one in first.new for place, tensors in one.parts.items()}

    def read(stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(stored[stretch, place]))

    again = fuse_prefix(decoder, plan, Prefix(), StoredPrefix(names, tuple(one.info for one in first.new)), read)
    return _distance(full, again.fused.logits)


def _nothing(stretch: bytes, place: Place) -> memoryview:
    raise AssertionError("nothing is stored yet")


# ---- law 6: what another arithmetic has made ---------------------------------------------------------------------

Chunk = tuple[Ids, ChunkKV]  # token ids and KV of as many
Compared = tuple[ConformanceCheck, float]  # how far logits are from each other, and what is lost in nats a token


def gate_records(
    store: Store, decoder: Decoder, identity: StoreIdentity, result: ConformanceResult, chunk_ids: Sequence[bytes]
) -> ConformanceResult:
    """Add to a result what it lacks of records among these that another arithmetic has made; it is kept."""

    def check(made: Arithmetic, allowed: float) -> Compared | None:
        chunks = [*islice(_chunks_of(store, identity, made, chunk_ids, decoder.stored_layers), MAX_CHUNKS)]
        return _check_records(decoder, identity, made, chunks, allowed) if chunks else None

    return _with_others(store, decoder, result, store.arithmetics(chunk_ids), check)


def gate_beginning(
    store: Store, decoder: Decoder, result: ConformanceResult, segments: Sequence[Ids], found: StoredPrefix
) -> ConformanceResult:
    """Add to a result what it lacks of a prompt's stored beginning that another arithmetic has made; it is kept."""

    def check(made: Arithmetic, allowed: float) -> Compared | None:
        count = _made_beginning(segments, found, made)
        some, read = found.of(range(count)), store.read_part
        return check_beginning(decoder, segments[:count], some, made, read, allowed) if count else None

    makers = (info.arithmetic for info in found.infos[: found.usable] if info)
    return _with_others(store, decoder, result, makers, check)


def _with_others(
    store: Store,
    decoder: Decoder,
    result: ConformanceResult,
    makers: Iterable[Arithmetic | None],
    check: Callable[[Arithmetic, float], Compared | None],
) -> ConformanceResult:
    """The result with what it lacks of these makers, as `check` finds it; kept where something was found."""
    own, found = decoder.loaded.arithmetic, result
    for made in sorted({maker for maker in makers if maker not in (None, own)}):
        if made in result.compared:
            continue
        measured = check(made, _roughest(TOLERANCE, decoder, getattr(torch, made.dtype)))
        if measured is not None:
            others = found.of_others | {str(made): measured[1]}
            found = replace(found, checks=(*found.checks, measured[0]), of_others=others)
    if found is not result:
        keep_result(store, found, own)
    return found


def _chunks_of(
    store: Store, identity: StoreIdentity, made: Arithmetic, chunk_ids: Sequence[bytes], layers: int
) -> Iterator[Chunk]:
    """Those of some chunks that this arithmetic has made, as they are stored without loss; long ones are cut."""
    for chunk_id in chunk_ids:
        with contextlib.suppress(DamagedError):
            info, level = store.chunk_info(chunk_id), exact_level(store, chunk_id)
            # One behind a lead-in of its own (`neighbour`, or an earlier one of the store) cannot be made again by it.
            if info and level and (info.arithmetic, info.lead_in) == (made, identity.lead_in.digest()):
                kv = read_chunk(store, chunk_id, level, layers)
                cut = ([side[:, :MAX_TOKENS] for side in sides] for sides in (kv.keys, kv.values))
                yield info.token_ids[:MAX_TOKENS], ChunkKV(*cut)


def _check_records(
    decoder: Decoder, identity: StoreIdentity, made: Arithmetic, chunks: Sequence[Chunk], allowed: float
) -> Compared:
    """Hold records that were made in `made` against what this decoder makes of the same chunks.

    The prompt is the chunks, none of them recomputed, and the model copies their beginnings.
    """
    lead_in = LeadIn(decoder, identity.lead_in.ids)
    own = [prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0] for ids, _ in chunks]
    ids, theirs = zip(*chunks, strict=True)
    reference, other = (_copied_from(decoder, identity.prefix, ids, kvs) for kvs in (own, theirs))
    return _compared(decoder, f"records made in {made}", reference, other, allowed)


def _copied_from(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> torch.Tensor:
    """Log-probabilities of the copy task behind a prompt of these records."""
    first, script = copy_task(chunks)
    plan = _plan(prefix, {b"%d" % number: ids for number, ids in enumerate(chunks)}, (first,))
    fused = fuse(decoder, plan, Reuse(), MemorySource(_by_id(decoder, prefix, kvs)), reserve=len(script))
    return copy_log_probs(decoder, fused.logits, fused.cache, script)


def _made_beginning(segments: Sequence[Ids], found: StoredPrefix, made: Arithmetic) -> int:
    """How many segments of a stored beginning to check with: they end with a state, and this arithmetic has made some
    of them. They have `_MAX_PREFIX_TOKENS` at most, or there are no fewer; 0: it has made nothing of it."""
    infos, tokens = found.infos[: found.usable], list(accumulate(map(len, segments)))
    first = next((number for number, info in enumerate(infos, 1) if info and info.arithmetic == made), len(infos) + 1)
    ends = [number for number, info in enumerate(infos, 1) if number >= first and info and info.states]
    return max((end for end in ends if tokens[end - 1] <= _MAX_PREFIX_TOKENS), default=ends[0] if ends else 0)


def check_beginning(
    decoder: Decoder, segments: Sequence[Ids], found: StoredPrefix, made: Arithmetic, read: ReadPart, allowed: float
) -> Compared | None:
    """Hold a beginning of a prompt as it is stored against what this decoder computes of it; None: it is damaged.

    Parameters
    ----------
    segments : token ids of the beginning, the prompt's own instruction first; `found` names as many stretches.
    allowed : the largest difference of logits that rounding explains.
    """
    prefix, *chunks = segments
    first, script = copy_task([ids for ids in segments if ids])
    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], (first,))
    fused = fuse_prefix(decoder, plan, Prefix(), found, read, len(script)).fused
    if fused.tokens.fresh > 1:
        return None
    logits, cache = decoder.prefill(plan.ids, len(script))
    own = copy_log_probs(decoder, logits, cache, script)
    return _compared(
        decoder, f"states made in {made}", own, copy_log_probs(decoder, fused.logits, fused.cache, script), allowed
    )


def _compared(decoder: Decoder, name: str, own: torch.Tensor, theirs: torch.Tensor, allowed: float) -> Compared:
    """Compare log-probabilities over what another arithmetic has made with those over one's own.

    Returns
    -------
    How far they are from each other, and the loss: KL divergence from one's own, in nats, as the mean over tokens;
    infinite where a number is not finite.
    """
    loss = float(F.kl_div(theirs, own, reduction="none", log_target=True).sum(-1).mean())
    check = ConformanceCheck(6, name, _distance(own, theirs), allowed, str(decoder.loaded.arithmetic))
    return check, loss if loss == loss else float("inf")


def copy_task(chunks: Sequence[Ids]) -> tuple[int, list[int]]:
    """Return a text that copies the beginnings of chunks: its first token, which ends the prompt, and those that
    follow. A model that cannot find in a cache what was in the prompt cannot copy it."""
    first, *script = [token for ids in chunks for token in ids[:_COPIED]]
    return first, script


def copy_log_probs(decoder: Decoder, logits: torch.Tensor, cache: PromptCache, script: Sequence[int]) -> torch.Tensor:
    """Log-probabilities, float64 `[1 + len(script), vocabulary]`: behind a prompt, whose last token's logits are given,
    and behind each token of the script. The cache needs room for it."""
    rows = [logits[None], *([decoder.extend(script, cache)] if script else [])]
    return torch.cat(rows).double().log_softmax(-1)
