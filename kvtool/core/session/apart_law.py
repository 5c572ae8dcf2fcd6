"""What the gate checks of chunks of a model that keeps states, computed apart, and what it finds that they lose.

That they lose something is no bug: a chunk has not seen what stands before it. So it is measured on the store's own
chunks, kept with the verdict, and held against a limit when a question asks for such a mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtool.core.cache.stretches import Place
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.fusion.apart import Stored, fuse_apart
from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.stretch import Found, NewStretch, ReadPart
from kvtool.core.model.alone import carries_wrongly
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.parts import encode_part
from kvtool.core.session.alone import AloneMaker
from kvtool.core.session.gate import GateCheck, GateVerdict, apart_name
from kvtool.core.session.identity import LeadInIds, StoreIdentity
from kvtool.core.session.quoting import nats_a_token, quotation, quoted
from kvtool.core.session.record_law import Held, held


def check_apart(
    identity: StoreIdentity, decoder: Decoder, chunks: Sequence[Ids], question: Ids, allowed: float
) -> GateVerdict:
    """Check laws 1, 3 and 4 on chunks computed apart, and measure what the modes that use them lose.

    The loss: the prompt is the chunks, and the model is led through the beginning of each once more; KL divergence from
    full prefill's distributions, in nats, as the mean over these tokens.

    Parameters
    ----------
    allowed : the largest difference that rounding explains.
    """
    own = _Bench(AloneMaker(identity, decoder), chunks)
    plain = replace(identity, lead_in=LeadInIds("prefix", identity.prefix)) if identity.prefix else identity
    everything, arithmetic = max(map(len, chunks)), str(decoder.loaded.arithmetic)
    off = own.distance(Epic(link_tokens=everything), chunks, question)
    checks = [
        GateCheck(1, "epic, all tokens, apart", off, allowed, arithmetic),
        GateCheck(4, "states carried through a chunk", own.carried(), allowed, arithmetic),
    ]
    if identity.prefix:
        bench = _Bench(AloneMaker(plain, decoder), chunks[:1])
        off = bench.distance(Reuse(), chunks[:1], question)
        checks.append(GateCheck(3, "one chunk apart, behind its lead-in", off, allowed, arithmetic))
    losses = {selector.name: own.loss(selector) for selector in (Reuse(), Epic())}
    return GateVerdict(apart_name(identity), tuple(sorted(checks, key=lambda check: check.law)), losses)


def check_alone(
    maker: AloneMaker, chunks: Sequence[Ids], found: Found, made: Arithmetic, read: ReadPart, allowed: float
) -> Held | None:
    """Law 6: hold a prompt of chunks as they are stored against one of what this machine makes of them.

    Parameters
    ----------
    found : of the prompt's own beginning and of each chunk what is stored.

    Returns
    -------
    See `record_law.held`; None: some of it is damaged.
    """
    decoder, (first, script) = maker.decoder, quotation(chunks)
    stored = Stored(found, maker.identity.lead_in.ids)
    theirs = fuse_apart(decoder, _plan(maker, chunks, (first,)), Reuse(), stored, read, len(script))
    if theirs.tokens.fresh > 1:
        return None
    own = _Bench(maker, chunks).fused(Reuse(), chunks, (first,), len(script))
    rows = [quoted(decoder, fused.logits, fused.cache, script) for fused in (own, theirs)]
    return held(decoder, f"chunks computed alone in {made}", rows[0], rows[1], allowed)


def _plan(maker: AloneMaker, chunks: Sequence[Ids], question: Ids) -> Plan:
    return build_plan(Candidate(maker.identity.prefix), [Candidate(ids) for ids in chunks], question)


@dataclass(frozen=True)
class _Shelf:
    """Stretches in memory, as bytes."""

    stretches: dict[Ids, NewStretch]
    parts: dict[tuple[bytes, Place], bytes]

    @classmethod
    def of(cls, stretches: dict[Ids, NewStretch]) -> _Shelf:
        parts = {(s.id, place): encode_part(tensors) for s in stretches.values() for place, tensors in s.parts.items()}
        return cls(stretches, parts)

    def read(self, stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(self.parts[stretch, place]))

    def found(self, segments: Sequence[Ids]) -> Found:
        held = [self.stretches.get(ids) for ids in segments]
        return Found(tuple(one.id if one else b"" for one in held), tuple(one.info if one else None for one in held))


class _Bench:
    """Chunks apart behind one lead-in, and the prompts they stand in."""

    def __init__(self, maker: AloneMaker, chunks: Sequence[Ids]) -> None:
        self._maker, self._chunks = maker, chunks
        stretches = {ids: maker.chunk(ids) for ids in chunks}
        if maker.identity.prefix:
            stretches[maker.identity.prefix] = maker.beginning()
        self._shelf = _Shelf.of(stretches)

    def distance(self, selector: Selector, chunks: Sequence[Ids], question: Ids) -> float:
        """Logits of a mode against full prefill: RMS of the difference over their standard deviation."""
        fused = self.fused(selector, chunks, question)
        full, _ = self._maker.decoder.prefill(fused.plan.ids)
        off = float((fused.logits - full).square().mean().sqrt() / full.std())
        return off if off == off else float("inf")

    def carried(self) -> float:
        """How far states are carried through a chunk otherwise than the layers carry them."""
        return carries_wrongly(self._maker.decoder, self._maker.behind, self._chunks[0])

    def loss(self, selector: Selector) -> float:
        """Nats a token that a mode loses where the model quotes what stands in its prompt."""
        decoder = self._maker.decoder
        first, script = quotation(self._chunks)
        fused = self.fused(selector, self._chunks, (first,), len(script))
        logits, cache = decoder.prefill(fused.plan.ids, len(script))
        full = quoted(decoder, logits, cache, script)
        return nats_a_token(full, quoted(decoder, fused.logits, fused.cache, script))

    def fused(self, selector: Selector, chunks: Sequence[Ids], question: Ids, reserve: int = 0) -> Fused:
        """The prompt put together."""
        maker = self._maker
        stored = Stored(self._shelf.found([maker.identity.prefix, *chunks]), maker.identity.lead_in.ids)
        plan = _plan(maker, chunks, question)
        return fuse_apart(maker.decoder, plan, selector, stored, self._shelf.read, reserve)
