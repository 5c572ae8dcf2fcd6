"""Counts of computed rows, taken where they are computed; and the cost of a mode as it states it."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Cost, LoadSpeed, PassSpeed, Plan, PromptRows, Span, Speeds
from kvtool.core.fusion.selectors import AUTO, MODES, REFERENCE, SELECTORS, WEIGHED
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic, Link
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from tests.fusion.making import BOS, CHUNKS, IDLE, LOSSLESS, NAMES, PREFIX, QUESTION, Case, SpySource, case, tokens

CONTEXT = sum(map(len, CHUNKS))
LAYERS = 4


def adds_up(fused: Fused) -> bool:
    counts = fused.tokens
    return (
        counts.prompt == fused.plan.length == counts.reused + counts.recomputed + counts.fresh
        and counts.recomputed == int(fused.recomputed.sum())
        and len(counts.rows) == LAYERS
        and counts.rows[-1] == counts.recomputed + counts.fresh
    )


@pytest.mark.parametrize("link", get_args(Link))
@pytest.mark.parametrize("k", [0, 1, 8, 16, 1000])
def test_epic_recomputes_k_tokens_of_every_chunk_that_is_not_exact(llama: Case, k: int, link: Any) -> None:
    for lead_in, chunks in ((BOS, CHUNKS), (PREFIX, CHUNKS[1:])):
        fused = llama.fuse(llama.plan(lead_in=lead_in), Epic(k, link))
        assert fused.tokens.recomputed == sum(min(k, len(ids)) for ids in chunks)
        assert adds_up(fused)


@pytest.mark.parametrize("link", get_args(Link))
def test_epic_takes_them_from_the_ends_it_names(llama: Case, link: Any) -> None:
    fused = llama.fuse(llama.plan(lead_in=BOS), Epic(8, link))
    chosen = fused.recomputed.nonzero()[:, 0].tolist()
    head, tail = {"initial": (8, 0), "final": (0, 8), "boundary": (4, 4)}[link]
    wanted: set[int] = set()
    for chunk in fused.plan.chunks:
        everything = range(chunk.start, chunk.stop)
        wanted |= {*everything[:head], *everything[max(0, len(everything) - tail) :]}
    assert set(chosen) == wanted


@pytest.mark.some(5)
@pytest.mark.parametrize("ratio", [0.01, 0.07, 0.15, 0.5, 0.55, 0.9, 1.0])
@pytest.mark.parametrize("check_layer", [1, 2, 9])
def test_blend_recomputes_the_ratio_of_the_cached_context(llama: Case, ratio: float, check_layer: int) -> None:
    fused = llama.fuse(llama.plan(lead_in=BOS), Blend(ratio, check_layer))
    assert fused.tokens.recomputed == math.ceil(round(ratio * CONTEXT, 6))
    assert adds_up(fused)


def test_blend_counts_the_ratio_that_was_meant(llama: Case) -> None:
    """0.07 · 100 is a little more than 7 in binary, 0.55 · 100 a little more than 55."""
    plan = llama.plan([tokens(60, 80), tokens(40, 81)], lead_in=BOS)
    for ratio, rows in ((0.07, 7), (0.55, 55), (0.14, 14), (0.071, 8), (0.0701, 8)):
        assert llama.fuse(plan, Blend(ratio)).tokens.recomputed == rows


def test_blend_is_clamped_to_rows_that_are_not_exact(llama: Case) -> None:
    plan = llama.plan([CHUNKS[1], CHUNKS[0]], lead_in=PREFIX)
    assert plan.chunks[0].status == "exact"
    fused = llama.fuse(plan, Blend(0.9))
    assert fused.tokens.recomputed == len(CHUNKS[0]) < math.ceil(0.9 * (len(CHUNKS[0]) + len(CHUNKS[1])))
    assert adds_up(fused)


def test_blend_rows_shrink_by_its_schedule(llama: Case) -> None:
    fused = llama.fuse(llama.plan(lead_in=BOS), Blend(0.2, check_layer=1, gradual=1.5, filter_layers=2))
    shares = (1.0, 0.3, 0.25, 0.2)
    fresh = len(QUESTION)
    assert fused.tokens.rows == tuple(math.ceil(round(share * CONTEXT, 6)) + fresh for share in shares)


def test_blend_keeps_the_rows_that_deviate_most(llama: Case, plan: Plan) -> None:
    """Once, at the check layer: the squared error of V against full prefill's own V (exact up to layer 1)."""
    fused = llama.fuse(plan, Blend(0.2, check_layer=1, filter_layers=0))
    _, full = llama.decoder.prefill(plan.ids)
    reused = llama.fuse(plan, Reuse()).cache
    context = plan.mask("hit").nonzero()[:, 0]
    error = (full.buffers[1].values - reused.buffers[1].values).square().sum((0, 1, 3))[context]
    best = context[error.topk(math.ceil(0.2 * CONTEXT)).indices]
    assert set(best.tolist()) == set(fused.recomputed.nonzero()[:, 0].tolist())


def test_prefix_full_and_reuse(llama: Case) -> None:
    plan = llama.plan(lead_in=PREFIX)
    counts = {kind.name: llama.fuse(plan, kind()).tokens for kind in (Full, Prefix, Reuse)}
    assert counts["full"].recomputed == len(PREFIX) + CONTEXT
    assert counts["prefix"].recomputed == CONTEXT - len(CHUNKS[0])
    assert counts["reuse"].recomputed == 0
    assert {count.fresh for count in counts.values()} == {len(QUESTION)}


@pytest.mark.some(7)
@pytest.mark.parametrize("holes", [(), (0,), (1, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", SELECTORS)
def test_a_prompt_is_what_is_reused_recomputed_and_fresh(llama: Case, name: str, holes: tuple[int, ...]) -> None:
    for selector in filter(None, (SELECTORS[name](), IDLE.get(name), LOSSLESS.get(name))):
        for lead_in in (BOS, PREFIX):
            fused = llama.fuse(llama.plan(lead_in=lead_in, holes=holes), selector)
            assert adds_up(fused)
            assert fused.tokens.fresh == len(QUESTION) + sum(len(CHUNKS[hole]) for hole in holes)


@pytest.mark.parametrize("name", NAMES)
def test_the_lm_head_sees_one_row(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shared = case(name)
    plan = shared.plan(lead_in=BOS)
    rows: list[int] = []
    head = shared.decoder.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[-2]))
    try:
        for selector in SELECTORS.values():
            shared.fuse(plan, selector())
    finally:
        handle.remove()
    assert rows == [1] * len(SELECTORS)


SPEEDS = Speeds(PassSpeed(0.0, 1.0, 0.0), {"raw": LoadSpeed(0.0, 1.0, 1.0, 1.0)}, LAYERS)


def rows_of(plan: Plan) -> PromptRows:
    return PromptRows([Span.of(segment) for segment in plan.segments], SPEEDS)


def read_by(plan: Plan, cost: Cost) -> list[int]:
    leading, found = True, []
    for segment in plan.cached:
        leading = leading and segment.status == "exact"
        if ("leading" if leading else segment.status) in cost.reads:
            found.append(segment.start)
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("lead_in", [BOS, PREFIX], ids=["bos", "prefix"])
@pytest.mark.parametrize("name", SELECTORS)
def test_a_mode_costs_what_it_says(name: str, lead_in: tuple[int, ...]) -> None:
    llama = case("llama")
    plan = llama.plan(lead_in=lead_in)
    prompt = rows_of(plan)
    for selector in filter(None, (SELECTORS[name](), IDLE.get(name), LOSSLESS.get(name))):
        source = SpySource(llama.source)
        fused = llama.fuse(plan, selector, source)
        cost = selector.cost(prompt)
        read = {start for _, starts in source.reads for start in starts}
        assert read <= set(read_by(plan, cost))
        assert read == {segment.start for segment in selector.reads(plan, LAYERS)}
        whole = sum(len(one.ids) for one in plan.cached if one.start not in read_by(plan, cost))
        stated = fused.tokens.fresh + (whole if cost.computes else 0) + cost.overlapped + cost.after
        computed = sum(fused.tokens.rows) / LAYERS
        # A mode that narrows ranks rows at the head of a layer, which counts for the whole of it.
        assert computed <= stated <= computed + (prompt.hits if selector.narrowing(plan, LAYERS) else 0)


def test_the_registry() -> None:
    assert [kind.name for kind in SELECTORS.values()] == [*MODES]
    assert WEIGHED in MODES
    assert SELECTORS[WEIGHED].knob == "ratio"
    assert SELECTORS[REFERENCE].lossless
    assert not SELECTORS[REFERENCE].uses_cache
    assert AUTO not in MODES
