"""Conformance checks of a model on a store's chunks: its error in each law (invariant) of `kvtool help design`. They
run when a model first uses a store. Law 6, that records and states of another arithmetic serve as well, is measured
when such are first used: their rounding is part of the numbers, but not of a record's name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.tables import Place
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, Encoded, shape_of_layer
from kvtool.core.codec.levels import RAW, exact
from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.records.read import exact_level, read_chunk, stored_shape
from kvtool.core.session.identity import ConformanceCheck, ConformanceResult, StoreIdentity, keep_result, stored_result

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.fusion.prefix_cache import ReadPart, StoredPrefix

_Number = TypeVar("_Number", int, float)
MAX_CHUNKS, MAX_TOKENS = 3, 32  # of the laws that are checked at a model's first use, which a person waits for
_MAX_COMPARED = 256  # tokens of a chunk whose records of another arithmetic are compared
_MAX_PREFIX_TOKENS = 768  # of a compared prefix: a state cannot be cut
_COPIED = 32  # first tokens of each chunk that the copy task is made of
_CANDIDATES = 8  # of the store's chunks, to find some that can be read
_QUESTION: Ids = (11, 7, 5, 3, 2)  # any ids do: the laws hold for all
SHIFT = 137

# The largest difference that rounding explains: of logits (laws 1 and 3) and of keys (law 4). Measured on the 15 tiny
# families and on SmolLM2-135M; "broken" is the mildest mutant tried, keys or un-rotation one position off.
#            logits: correct        broken        keys: correct   broken
# float32    2e-6                   0.05 … 0.3    2e-6            0.16 … 0.4
# bfloat16   0.02 (SmolLM2: 0.08)   0.05 … 0.3    0.02            0.16 … 0.4
# float16    0.014                  0.07 … 0.3    0.002           0.24
# So in bfloat16 a loader that is one position off can pass law 1 and 3; all other mutants fail one law or another.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05, torch.int8: 0.15}
KEY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.05, torch.int8: 0.08}

# In half precision a rounded router score may choose another expert: a correct mixture of experts differed by 0.29 in
# one prompt of 24. What is broken is broken in every prompt, so the chunks get other turns before the gate refuses.
TURNS = {torch.float32: 1, torch.bfloat16: 3, torch.float16: 3, torch.int8: 3}


def gate_store(
    store: Store, decoder: Decoder, identity: StoreIdentity, chunks: Sequence[Ids] | None = None
) -> ConformanceResult | None:
    """Return the stored result, or measure one on `chunks` (token ids; None: the store's); None without any chunk."""
    arithmetic = decoder.loaded.arithmetic
    result = stored_result(store, identity.fingerprint, arithmetic) if decoder.loaded.fingerprint else None
    if result is not None:
        return result
    chunks = _own_chunks(store, identity) if chunks is None else chunks
    if not chunks:
        return None
    result = check_invariants(decoder, identity.fingerprint, identity.prefix, chunks)
    _keep(store, decoder, result)
    return result


def _keep(store: Store, decoder: Decoder, result: ConformanceResult) -> None:
    """Store a result, unless nobody knows whose weights gave it: it would pass as the store's model's."""
    if decoder.loaded.fingerprint:
        keep_result(store, result, decoder.loaded.arithmetic)


def _own_chunks(store: Store, identity: StoreIdentity) -> list[Ids]:
    chunks = []
    for chunk_id in store.chunk_ids()[:_CANDIDATES]:
        with contextlib.suppress(DamagedError):
            info = store.chunk_info(chunk_id)
            if info is not None and info.token_ids != identity.prefix:
                chunks.append(info.token_ids)
    return chunks


def check_invariants(
    decoder: Decoder, fingerprint: str, prefix: Ids, chunks: Sequence[Ids], question: Ids = _QUESTION
) -> ConformanceResult:
    """Check laws 1, 3, 4 and 7 on some chunks (token ids; long ones are cut); of a recurrent model, law 3. The chunks
    are prefilled here after the plain prefix, whatever the store's lead-in: then the laws hold exactly."""
    chunks = [ids[:MAX_TOKENS] for ids in chunks[:MAX_CHUNKS]]
    arithmetic = str(decoder.loaded.arithmetic)
    if decoder.keeps_states:  # no number is rounded to the store's format here
        allowed, turns = TOLERANCE[decoder.dtype], TURNS[decoder.dtype]
        off = _least(lambda shift: _prefix_error(decoder, prefix, _turned(chunks, shift), question), allowed, turns)
        check = ConformanceCheck(3, "a question after a stored beginning", off, allowed, arithmetic)
        return ConformanceResult(fingerprint, (check,))
    bench = _Prompts(decoder, prefix, chunks, question)
    everything = max(map(len, chunks))
    logits, turns = _roughest(TOLERANCE, decoder), _roughest(TURNS, decoder)
    keys = _roughest(KEY_TOLERANCE, decoder)

    def check_of(law: int, name: str, allowed: float, measure: Callable[[int], float]) -> ConformanceCheck:
        return ConformanceCheck(law, name, _least(measure, allowed, turns), allowed, arithmetic)

    all_of = len(chunks)
    checks = [
        check_of(1, "blend 100 %", logits, lambda shift: bench.distance(Blend(ratio=1.0), all_of, shift)),
        check_of(1, "epic, all tokens", logits, lambda shift: bench.distance(Epic(everything), all_of, shift)),
        check_of(3, "one chunk after its lead-in", logits, lambda shift: bench.distance(Reuse(), 1, shift)),
        check_of(4, f"keys moved by {SHIFT}", keys, bench.shifted),
        ConformanceCheck(7, "lossless levels", bench.lossless(), 0.0, arithmetic),
    ]
    return ConformanceResult(fingerprint, tuple(checks))


def _roughest(by_dtype: dict[torch.dtype, _Number], decoder: Decoder, *others: torch.dtype) -> _Number:
    computed: torch.dtype = getattr(torch, decoder.loaded.arithmetic.dtype)
    return max(by_dtype[dtype] for dtype in (computed, decoder.kv_dtype, *others))


def _turned(chunks: Sequence[Ids], shift: int) -> list[Ids]:
    return [chunks[(index + shift) % len(chunks)] for index in range(len(chunks))]


def _least(measure: Callable[[int], float], allowed: float, turns: int) -> float:
    """Measure until a difference is allowed; return it, else the smallest of all turns."""
    least = float("inf")
    for number in range(turns):
        least = min(least, measure(number))
        if least <= allowed:
            break
    return least


def _distance(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the RMS difference over the reference's standard deviation; infinity if a number is not finite."""
    if not bool(torch.isfinite(other).all()):
        return float("inf")
    wide = reference.double()
    spread = (wide - wide.mean()).square().mean().sqrt().clamp_min(1e-6)
    return float((wide - other.double()).square().mean().sqrt() / spread)


class _Prompts:
    def __init__(self, decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> None:
        self._decoder, self._prefix, self._chunks, self._question = decoder, prefix, chunks, question
        self._references: dict[Ids, torch.Tensor] = {}
        lead_in = LeadIn(decoder, prefix)
        kvs = [prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0] for ids in chunks]
        self._kv = _by_id(decoder, prefix, kvs)

    def distance(self, selector: Selector, count: int, shift: int = 0) -> float:
        """Compare a mode's logits with full prefill, over a prompt of `count` chunks from number `turn` on."""
        order = [(index + shift) % len(self._chunks) for index in range(count)]
        chunks = {b"%d" % number: self._chunks[number] for number in order}
        plan = _plan(self._prefix, chunks, self._question, ids_digest(self._prefix))
        fused = fuse(self._decoder, plan, selector, MemorySource(self._kv))
        return _distance(self._full(tuple(plan.ids)), fused.logits)

    def _full(self, ids: Ids) -> torch.Tensor:
        if ids not in self._references:
            self._references[ids], _ = self._decoder.prefill(ids)
        return self._references[ids]

    def shifted(self, shift: int = 0) -> float:
        """Compare stored keys, rotated to positions `SHIFT` later, with a prefill at shifted position ids."""
        decoder, number = self._decoder, shift % len(self._chunks)
        ids = [*self._prefix, *self._chunks[number]]
        cache = decoder.new_cache(len(ids))
        cache.set_length(len(ids))
        with torch.inference_mode():
            moved = torch.arange(SHIFT, SHIFT + len(ids), device=decoder.device)
            decoder.compute(ids, QueryRows.of(torch.arange(len(ids)), decoder.device, moved.tolist()), cache)
            table = decoder.rotary.table(moved[len(self._prefix) :])
            stored, worst = self._kv[b"%d" % number].keys, 0.0
            for layer, buffer in enumerate(cache.buffers):
                keys = decoder.rotary.rotate(stored[layer][None].to(decoder.device), table, layer)
                worst = max(worst, _distance(buffer.keys[:, :, len(self._prefix) : len(ids)], keys))
        return worst

    def lossless(self) -> float:
        kv = self._kv[b"0"]
        layer = kv.layers[0]
        for codec in (CODECS[level] for level in exact()):
            data = b"".join(codec.encode_layers([layer])[0])
            item = Encoded(bytearray(data), shape_of_layer(layer), NAMES[kv.dtype])
            sides = codec.decode([item])[0]
            if not all(torch.equal(a, b) for a, b in zip(sides, layer, strict=True)):
                return 1.0
        return 0.0


def _by_id(decoder: Decoder, prefix: Ids, kvs: Sequence[ChunkKV]) -> dict[bytes, ChunkKV]:
    stored = {b"%d" % number: kv for number, kv in enumerate(kvs)}
    if prefix:
        stored[b"prefix"] = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(prefix)])[0]
    return stored


def _plan(prefix: Ids, chunks: dict[bytes, Ids], question: Ids, lead_in: bytes = b"") -> Plan:
    candidates = [Candidate(ids, chunk, lead_in, RAW) for chunk, ids in chunks.items()]
    return build_plan(Candidate(prefix, b"prefix", ids_digest([]), RAW if prefix else None), candidates, question)


def _prefix_error(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> float:
    """Answer a prompt, encode its prefix, restore it; return the distance of the question's logits to full prefill's.
    Models differ in whether their forward continues a state with several tokens at once; some silently restart."""
    from kvtool.core.fusion.prefix_cache import StoredPrefix, encode_part, fuse_prefix  # of transformers

    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], question)
    full, _ = decoder.prefill(plan.ids)
    names, stored = (
        tuple(b"%d" % number for number in range(len(plan.segments) - 1)),
        dict[tuple[bytes, Place], bytes](),
    )

    def read(stretch: bytes, key: Place) -> memoryview:
        return memoryview(bytearray(stored[stretch, key]))

    first = fuse_prefix(decoder, plan, Prefix(), StoredPrefix(names, (None,) * len(names)), read)
    stored |= {(part.id, key): encode_part(tensors) for part in first.new for key, tensors in part.parts.items()}
    prefix_of = StoredPrefix(names, tuple(stretch.info for stretch in first.new))
    return _distance(full, fuse_prefix(decoder, plan, Prefix(), prefix_of, read).fused.logits)


# ---- law 6: KV of another arithmetic -----------------------------------------------------------------------------

Chunk = tuple[Ids, ChunkKV]  # token ids and their KV
Compared = tuple[ConformanceCheck, float]  # the check, and the loss in nats a token


def cross_dtype_records(
    store: Store, decoder: Decoder, identity: StoreIdentity, result: ConformanceResult, chunk_ids: Sequence[bytes]
) -> ConformanceResult:
    """Add to a result the loss of these chunks' records of other arithmetics, unless it has it; store the result."""

    def check(maker: Arithmetic, allowed: float) -> Compared | None:
        chunks = [*islice(_chunks_of(store, identity, maker, chunk_ids, decoder), MAX_CHUNKS)]
        return _compare_records(decoder, identity, maker, chunks, allowed) if chunks else None

    return _add_cross_dtype(store, decoder, result, store.arithmetics(chunk_ids), check)


def cross_dtype_prefix(
    store: Store, decoder: Decoder, result: ConformanceResult, segments: Sequence[Ids], prefix: StoredPrefix
) -> ConformanceResult:
    """Add to a result the loss of a prompt's stored prefix of other arithmetics, unless it has it; store the result."""

    def check(maker: Arithmetic, allowed: float) -> Compared | None:
        count = _made_prefix(segments, prefix, maker)
        stored, read = prefix.first(count), store.read_part
        return compare_prefix(decoder, segments[:count], stored, maker, read, allowed) if count else None

    makers = (info.arithmetic for info in prefix.infos[: prefix.usable] if info)
    return _add_cross_dtype(store, decoder, result, makers, check)


def _add_cross_dtype(
    store: Store,
    decoder: Decoder,
    result: ConformanceResult,
    makers: Iterable[Arithmetic | None],
    check: Callable[[Arithmetic, float], Compared | None],
) -> ConformanceResult:
    """Add the loss of each of these makers that the result lacks, as `check` measures it; store it if any was added."""
    arithmetic, outcome = decoder.loaded.arithmetic, result
    for maker in sorted({maker for maker in makers if maker not in (None, arithmetic)}):
        if str(maker) in result.cross_dtype_loss:
            continue
        measured = check(maker, _roughest(TOLERANCE, decoder, getattr(torch, maker.dtype)))
        if measured is not None:
            others = outcome.cross_dtype_loss | {str(maker): measured[1]}
            outcome = replace(outcome, checks=(*outcome.checks, measured[0]), cross_dtype_loss=others)
    if outcome is not result:
        _keep(store, decoder, outcome)
    return outcome


def _chunks_of(
    store: Store, identity: StoreIdentity, maker: Arithmetic, chunk_ids: Sequence[bytes], decoder: Decoder
) -> Iterator[Chunk]:
    for chunk_id in chunk_ids:
        with contextlib.suppress(DamagedError):
            info, level = store.chunk_info(chunk_id), exact_level(store, chunk_id)
            # A chunk after another lead-in (`neighbour`, or an earlier one of the store) cannot be made again here.
            if info and level and (info.arithmetic, info.lead_in) == (maker, identity.lead_in.digest()):
                shapes = [stored_shape(shape, len(info.token_ids)) for shape in decoder.shapes]
                kv = read_chunk(store, chunk_id, level, len(shapes), shapes=shapes)
                cut = ([side[:, :_MAX_COMPARED] for side in sides] for sides in (kv.keys, kv.values))
                yield info.token_ids[:_MAX_COMPARED], ChunkKV(*cut)


def _compare_records(
    decoder: Decoder, identity: StoreIdentity, maker: Arithmetic, chunks: Sequence[Chunk], allowed: float
) -> Compared:
    """Compare records made in `made` with this decoder's own records of the same chunks. The prompt is these chunks,
    none of them recomputed, and the model copies their first tokens."""
    lead_in = LeadIn(decoder, identity.lead_in.ids)
    computed = [prefill_chunks(decoder, lead_in, [PrefillItem(ids)])[0] for ids, _ in chunks]
    ids, theirs = zip(*chunks, strict=True)
    reference, other = (_copied_from(decoder, identity.prefix, ids, kvs) for kvs in (computed, theirs))
    return _compared(decoder, f"records made in {maker}", reference, other, allowed)


def _copied_from(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> torch.Tensor:
    first, script = copy_task(chunks)
    plan = _plan(prefix, {b"%d" % number: ids for number, ids in enumerate(chunks)}, (first,))
    fused = fuse(decoder, plan, Reuse(), MemorySource(_by_id(decoder, prefix, kvs)), reserve=len(script))
    return copy_log_probs(decoder, fused.logits, fused.cache, script)


def _made_prefix(segments: Sequence[Ids], prefix: StoredPrefix, maker: Arithmetic) -> int:
    """Count the segments of a stored prefix to compare: they end with a state, and this arithmetic has made some. They
    have `_MAX_PREFIX_TOKENS` at most, unless the first such state is later; 0: it has made none."""
    infos, tokens = prefix.infos[: prefix.usable], list(accumulate(map(len, segments)))
    first = next((number for number, info in enumerate(infos, 1) if info and info.arithmetic == maker), len(infos) + 1)
    ends = [number for number, info in enumerate(infos, 1) if number >= first and info and info.states]
    return max((end for end in ends if tokens[end - 1] <= _MAX_PREFIX_TOKENS), default=ends[0] if ends else 0)


def compare_prefix(
    decoder: Decoder, segments: Sequence[Ids], stored: StoredPrefix, maker: Arithmetic, read: ReadPart, allowed: float
) -> Compared | None:
    """Compare a stored prefix of a prompt with this decoder's own one; None if it is damaged. `segments`: token ids of
    the prefix, the prompt's instruction first. `allowed`: the largest difference of logits that rounding explains."""
    from kvtool.core.fusion.prefix_cache import fuse_prefix  # of transformers

    prefix, *chunks = segments
    first, script = copy_task([ids for ids in segments if ids])
    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], (first,))
    fused = fuse_prefix(decoder, plan, Prefix(), stored, read, len(script)).fused
    if fused.tokens.fresh > 1:
        return None
    logits, cache = decoder.prefill(plan.ids, len(script))
    log_probs = copy_log_probs(decoder, logits, cache, script)
    theirs = copy_log_probs(decoder, fused.logits, fused.cache, script)
    return _compared(decoder, f"states made in {maker}", log_probs, theirs, allowed)


def _compared(decoder: Decoder, name: str, computed: torch.Tensor, theirs: torch.Tensor, allowed: float) -> Compared:
    """Compare log-probabilities over another arithmetic's KV with those over this one's own: the check, and the loss,
    which is the KL divergence in nats, the mean over tokens; infinity for a number that is not finite."""
    loss = float(F.kl_div(theirs, computed, reduction="none", log_target=True).sum(-1).mean())
    check = ConformanceCheck(6, name, _distance(computed, theirs), allowed, str(decoder.loaded.arithmetic))
    return check, loss if loss == loss else float("inf")


def copy_task(chunks: Sequence[Ids]) -> tuple[int, list[int]]:
    """Make a text that copies the first tokens of chunks: its first token, which ends the prompt, and the others. A
    model can only copy what it finds in its cache."""
    first, *script = [token for ids in chunks for token in ids[:_COPIED]]
    return first, script


def copy_log_probs(decoder: Decoder, logits: torch.Tensor, cache: PromptCache, script: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities after a prompt, of whose last token `logits` are, and after each token of a script,
    float64 `[1 + script, vocabulary]`. The cache has room for the script."""
    rows = [logits[None], *([decoder.extend(script, cache)] if script else [])]
    return torch.cat(rows).double().log_softmax(-1)
