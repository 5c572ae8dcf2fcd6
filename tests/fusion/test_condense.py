"""Chunks of which some rows are not stored: the stored ones close up, keep their positions, and see nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from kvtool.core.evaluate.reference import forced_logits
from kvtool.core.fusion.engine import Fused, compact_plan
from kvtool.core.fusion.plan import Candidate, LoadSpeed, PassSpeed, Plan, PromptRows, Segment, Span, Speeds, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.source import KVSource, ReadStats
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.decode.cuda_graph import StaticStep
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.generate import greedy_prefix
from kvtool.core.query.fuse_prompt import extend_fused, joined
from tests.fusion.making import (
    BOS,
    CHUNKS,
    IDLE,
    LOSSLESS,
    NAMES,
    PREFIX,
    QUESTION,
    Case,
    SpySource,
    assert_full,
    case,
    distance,
    missing_at,
    same_bits,
    tokens,
)

LEVEL = "keep50-raw"
LOAD = LoadSpeed(0.0, 1.0, 1.0, 1.0)
SPEEDS = Speeds(PassSpeed(0.0, 1.0, 0.0), {"raw": LOAD, LEVEL: LOAD}, 4)
KEPT = (tuple(range(0, 23, 2)), (0, 1, 2, 3, 30, 31, 70), None, tuple(range(4)))  # of each of CHUNKS
DROPPED = sum(len(ids) - len(kept) for ids, kept in zip(CHUNKS, KEPT, strict=True) if kept is not None)


@dataclass
class SomeRows(KVSource):
    inner: KVSource

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[tuple[torch.Tensor, ...]]:
        read = zip(segments, self.inner.read(segments, layer, stats), strict=True)
        return [tuple(side[:, list(segment.source.rows)] for side in kv) for segment, kv in read]


def sparse(source: Candidate, kept: tuple[int, ...] | None) -> Candidate:
    return source if kept is None else replace(source, level=LEVEL, stored_rows=kept)


def plan_of(one: Case, lead_in: tuple[int, ...] = BOS, question: tuple[int, ...] = QUESTION) -> Plan:
    chunks = [sparse(one.candidate(ids, lead_in), kept) for ids, kept in zip(CHUNKS, KEPT, strict=True)]
    return build_plan(one.candidate(PREFIX, ()), chunks, question)


def fuse(one: Case, selector: Selector, plan: Plan | None = None, reserve: int = 16) -> Fused:
    return one.fuse(plan or plan_of(one), selector, SomeRows(one.source), reserve=reserve)


@dataclass(frozen=True, eq=False)
class Hiding(QueryRows):
    """Rows at their positions in a cache of the whole prompt, from which some keys are hidden by a mask."""

    hidden: torch.Tensor = field(kw_only=True)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: AttentionParams
    ) -> torch.Tensor:
        whole, gone = self.seen(scoring.window), self.hidden[: key.shape[2]]
        out = []
        for row, place in enumerate(self.order):  # each over its own keys
            own = ~whole.hidden(slice(row, row + 1), 0, key.shape[2])[0] & ~gone
            seen = KeyRanges([int(own.sum()) - 1], torch.tensor([int(own.sum()) - 1]))
            weights = attention_weights(query[0, :, [row]], key[0, :, own], seen, scoring)
            assert place < key.shape[2]
            values = value[0, :, own].repeat_interleave(query.shape[1] // value.shape[1], 0)
            out.append(weights @ values)
        return torch.cat(out, 1)[None]


def masked(one: Case, links: int = 0, question: tuple[int, ...] = QUESTION, keep: int = 1) -> torch.Tensor:
    """Return the logits of the last rows where every row has its place and the dropped ones are masked; `links`: the
    number of stored rows of each chunk that are computed."""
    whole = build_plan(one.candidate(PREFIX, ()), [one.candidate(ids, BOS) for ids in CHUNKS], question)
    cache = one.fuse(whole, Reuse()).cache
    hidden = torch.zeros(whole.length, dtype=torch.bool)
    computed = torch.zeros(whole.length, dtype=torch.bool)
    for segment, kept in zip(whole.chunks, KEPT, strict=True):
        there = list(range(len(segment.ids))) if kept is None else list(kept)
        hidden[segment.start : segment.stop] = True
        hidden[[segment.start + token for token in there]] = False
        computed[[segment.start + token for token in there[:links]]] = True
    computed[whole.segments[-1].start :] = True
    at = computed.nonzero()[:, 0]
    rows = Hiding(at, at.tolist(), False, hidden=hidden)
    return one.decoder.compute([whole.ids[place] for place in at.tolist()], rows, cache, keep=keep)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen3"])
def test_recompute_everything_is_full_prefill(family: str, name: str) -> None:
    """Then all of a chunk is there, even if only some rows of it were stored."""
    for lead_in in (BOS, PREFIX):
        plan = plan_of(case(family), lead_in)
        fused = fuse(case(family), LOSSLESS[name], plan)
        assert_full(case(family), plan.ids, fused.logits)
        assert (fused.tokens.dropped, fused.tokens.prompt) == (0, plan.length)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", IDLE)
def test_recompute_nothing_is_reuse(name: str, dtype: str) -> None:
    one = case("llama", dtype)
    reused, other = fuse(one, Reuse()), fuse(one, IDLE[name])
    assert same_bits(reused, other)
    assert other.tokens == reused.tokens
    assert other.tokens.recomputed == 0
    assert other.tokens.dropped == DROPPED
    assert other.tokens.prompt == plan_of(one).length - DROPPED == other.cache.buffers[0].length


@pytest.mark.parametrize("family", NAMES)
def test_reuse_is_attention_over_the_rows_that_stand(family: str) -> None:
    one = case(family)
    assert distance(fuse(one, Reuse()).logits, masked(one)[-1]) <= 1e-4


@pytest.mark.parametrize("links", [1, 3])
def test_recomputed_rows_see_what_stands(llama: Case, links: int) -> None:
    fused = fuse(llama, Epic(link_tokens=links, shift=False))
    assert distance(fused.logits, masked(llama, links)[-1]) <= 1e-4
    assert fused.tokens.recomputed == sum(min(links, len(ids)) for ids in CHUNKS)


@pytest.mark.parametrize("selector", [Union(0.4), Blend(0.4), Union(0.3, links=2)], ids=repr)
def test_a_share_is_of_what_stands(llama: Case, selector: Selector) -> None:
    fused = fuse(llama, selector)
    context = sum(map(len, CHUNKS)) - DROPPED
    assert fused.tokens.recomputed == -(-round(context * selector.amount, 6) // 1)
    assert fused.tokens.dropped == DROPPED


@pytest.mark.parametrize("family", ["llama", "smollm3", "llama-yarn"])
def test_the_answer_goes_on_behind_the_question(family: str) -> None:
    """The next token's position counts what is not there: in torch, in machine code and as a graph would."""
    one, script = case(family), tokens(5, 77)
    expected = masked(one, question=(*QUESTION, *script[:-1]), keep=len(script))
    fused = fuse(one, Reuse())
    assert distance(forced_logits(one.decoder, fused, script), expected) <= 1e-4
    fused.cache.set_length(fused.plan.length)
    said = greedy_prefix(one.decoder, fused.cache, fused.logits, 4).ids
    again, logits = fuse(one, Reuse()), [fused.logits]
    for token in said[:-1]:
        logits.append(one.decoder.extend([token], again.cache)[-1])
    assert said == tuple(int(each.argmax()) for each in logits)
    third = fuse(one, Reuse())
    step = StaticStep(one.decoder, third.cache)
    step.give(script[0])
    assert distance(step.run(), expected[1]) <= 1e-4


def test_the_sensitivity_is_that_of_the_rows_that_stand(llama: Case) -> None:
    whole, plan = plan_of(llama), compact_plan(plan_of(llama), Reuse(), 4)
    at = plan.positions
    assert torch.equal(plan.sensitivity()[: plan.chunks[-1].stop], whole.sensitivity()[at][: plan.chunks[-1].stop])
    assert plan.dropped == DROPPED
    assert plan.ids == [whole.ids[position] for position in at.tolist()]


def test_a_record_that_cannot_be_read_is_a_whole_hole(llama: Case) -> None:
    fused = llama.fuse(plan_of(llama), Reuse(), SpySource(SomeRows(llama.source), missing_at(2, 2)))
    hole = fused.plan.chunks[1]
    assert (hole.status, hole.ids, hole.reason) == ("miss", CHUNKS[1], "damaged at layer 2")
    assert fused.tokens.dropped == DROPPED - len(CHUNKS[1]) + len(KEPT[1] or ())


@pytest.mark.parametrize("first", [1, 2])
def test_rounds_are_one_pass(llama: Case, first: int) -> None:
    plan = plan_of(llama)
    prefix, *chunks, question = plan.segments
    sources, kv = [segment.source for segment in chunks], SomeRows(llama.source)
    begun = llama.fuse(build_plan(prefix.source, sources[:first], question.ids), Reuse(), kv, reserve=200)
    now = extend_fused(llama.decoder, begun, sources[first:], Reuse(), kv)
    whole, once = joined(begun, now), fuse(llama, Reuse())
    assert distance(whole.logits, once.logits) <= 1e-5
    assert whole.plan.positions.tolist() == once.plan.positions.tolist()
    assert (whole.tokens.dropped, whole.tokens.prompt) == (DROPPED, once.tokens.prompt)
    assert whole.cache.dropped == DROPPED


def test_what_is_dropped_is_neither_read_nor_shared_out(llama: Case) -> None:
    prompt = PromptRows([Span.of(segment) for segment in plan_of(llama).segments], SPEEDS)
    whole = PromptRows([Span.of(segment) for segment in llama.plan(lead_in=BOS).segments], SPEEDS)
    assert whole.context - prompt.context == DROPPED
    assert sum(prompt.hit_chunks) == sum(whole.hit_chunks) - DROPPED
    assert prompt.length == whole.length
