"""The law that a model which keeps states must pass: behind a beginning that was stored it says what full prefill says.

Models differ in whether their forward goes on from a state with several tokens at once; some begin anew without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.cache.stretches import Place
from kvtool.core.common.types import Ids
from kvtool.core.fusion.chain import Chained, fuse_chain
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.stretch import Found
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.parts import encode_part
from kvtool.core.session.gate import GateCheck, GateVerdict

LAW = 3
NAME = "a question behind a stored beginning"


def check_states(
    decoder: Decoder, fingerprint: str, prefix: Ids, chunks: Sequence[Ids], question: Ids, allowed: float, turns: int
) -> GateVerdict:
    """Answer a prompt, store its beginning as bytes, read it back, and hold the logits behind it against full prefill.

    Parameters
    ----------
    allowed : the largest difference that rounding explains.
    turns : how many orders of the chunks are tried before a difference counts: a rounded router score may choose
        another expert in one of them, and what is broken is broken in all.
    """
    found = float("inf")
    for turn in range(turns):
        cut = turn % len(chunks)
        found = min(found, _distance(decoder, prefix, [*chunks[cut:], *chunks[:cut]], question))
        if found <= allowed:
            break
    return GateVerdict(fingerprint, (GateCheck(LAW, NAME, found, allowed, str(decoder.loaded.arithmetic)),))


def _distance(decoder: Decoder, prefix: Ids, chunks: Sequence[Ids], question: Ids) -> float:
    plan = build_plan(Candidate(prefix), [Candidate(ids) for ids in chunks], question)
    full, _ = decoder.prefill(plan.ids)
    again = _again(decoder, plan)
    return float((again.fused.logits - full).square().mean().sqrt() / full.std())


def _again(decoder: Decoder, plan: Plan) -> Chained:
    """The prompt once more, from what was stored of it."""
    names = tuple(b"%d" % number for number in range(len(plan.segments) - 1))
    first = fuse_chain(decoder, plan, Prefix(), Found(names, (None,) * len(names)), _nothing)
    stored = {(one.id, place): encode_part(tensors) for one in first.new for place, tensors in one.parts.items()}
    infos = tuple(one.info for one in first.new)

    def read(stretch: bytes, place: Place) -> memoryview:
        return memoryview(bytearray(stored[stretch, place]))

    return fuse_chain(decoder, plan, Prefix(), Found(names, infos), read)


def _nothing(stretch: bytes, place: Place) -> memoryview:
    raise AssertionError("nothing is stored yet")
