"""Prompts fused in rounds: earlier rows are not read or computed again, and the whole is what one pass would give."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Candidate
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.generate import Sampling, first_token, generate
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
    Ids,
    SpySource,
    assert_full,
    case,
    distance,
    join_loaders,
    missing_at,
    needed,
    new_case,
    same_bits,
)
from tests.fusion.test_loader import SlowSource

LAYERS = 4
FIRST = CHUNKS[:1]
LATER = (CHUNKS[1:3], CHUNKS[3:])  # the second and the third round


def in_rounds(
    one: Case,
    selector: Selector,
    source: KVSource | None = None,
    *,
    later: Sequence[Sequence[Ids]] = LATER,
    holes: Sequence[Ids] = (),
    said: int = 0,
    patience: float | None = None,
) -> Fused:
    """The chunks in three rounds; `said`: answer tokens that are generated after each, as a probe does."""
    source = source or one.source
    fused = one.fuse(one.plan(FIRST, lead_in=BOS), selector, source, reserve=200)
    for chunks in later:
        if said:
            sampling = Sampling.greedy(said)
            generate(one.decoder, fused.cache, first_token(fused.logits, sampling), sampling)
        wanted = [Candidate(ids, reason="lost") if ids in holes else one.candidate(ids, BOS) for ids in chunks]
        now = extend_fused(one.decoder, fused, wanted, selector, source, patience=patience)
        counts = now.tokens
        assert counts.prompt == counts.resident + counts.reused + counts.recomputed + counts.fresh
        assert counts.resident == fused.plan.segments[-1].start
        fused = joined(fused, now)
    return fused


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in LOSSLESS), ("union", "bfloat16")])
def test_recompute_everything_in_rounds_is_full_prefill(name: str, family: str, dtype: str) -> None:
    fused = in_rounds(case(family, dtype), LOSSLESS[name], said=3)
    assert_full(case(family, dtype), fused.plan.ids, fused.logits)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("name", IDLE)
def test_recompute_nothing_in_rounds_is_one_round(name: str, family: str) -> None:
    one, selector = case(family), IDLE[name]
    whole = one.fuse(one.plan(lead_in=BOS), selector)
    fused = in_rounds(one, selector, said=3)
    assert fused.plan == whole.plan
    assert distance(fused.logits, whole.logits) <= 1e-4
    assert fused.tokens.reused == whole.tokens.reused
    assert fused.tokens.fresh == whole.tokens.fresh


def test_link_tokens_in_rounds_are_those_of_one_round(llama: Case) -> None:
    whole, fused = llama.fuse(llama.plan(lead_in=BOS), Epic()), in_rounds(llama, Epic())
    assert torch.equal(fused.recomputed, whole.recomputed)
    assert distance(fused.logits, whole.logits) <= 1e-4
    assert {name: int(rows.sum()) for name, rows in fused.reasons.items()} == {"link token": fused.tokens.recomputed}


def test_reused_rows_are_the_same_bits(llama: Case) -> None:
    whole, fused = llama.fuse(llama.plan(lead_in=BOS), Reuse()), in_rounds(llama, Reuse())
    fused.cache.set_length(fused.plan.length)
    assert same_bits(fused, whole)


@pytest.mark.parametrize("name", SELECTORS)
def test_counts_of_the_whole_prompt(llama: Case, name: str) -> None:
    fused = in_rounds(llama, SELECTORS[name]())
    counts = fused.tokens
    assert counts.prompt == counts.reused + counts.recomputed + counts.fresh == fused.plan.length
    assert counts.fresh == len(QUESTION)
    assert counts.recomputed == int(fused.recomputed.sum()) == sum(int(rows.sum()) for rows in fused.reasons.values())
    assert [len(segment.ids) for segment in fused.plan.chunks] == [len(ids) for ids in CHUNKS]


@pytest.mark.parametrize("name", [name for name in SELECTORS if SELECTORS[name].uses_cache and name != Prefix.name])
def test_a_record_is_read_in_its_own_round_only(llama: Case, name: str) -> None:
    """Of those that are read at all: one that is recomputed whole is not."""
    source, selector = SpySource(llama.source), SELECTORS[name]()
    fused = in_rounds(llama, selector, source, said=2)
    wanted = {segment.start for segment in needed(fused, selector)}
    prefix, *chunks = [segment.start for segment in fused.plan.segments[:-1]]
    rounds = [tuple(at for at in some if at in wanted) for some in ([prefix, chunks[0]], chunks[1:3], chunks[3:])]
    assert source.reads == [(layer, starts) for starts in rounds for layer in range(LAYERS)]


@pytest.mark.parametrize("name", SELECTORS)
def test_resident_rows_stay(llama: Case, name: str) -> None:
    selector = SELECTORS[name]()
    first = llama.fuse(llama.plan(FIRST, lead_in=BOS), selector, reserve=200)
    stand = first.plan.segments[-1].start
    before = [side[:, :, :stand].clone() for layer in first.cache.buffers for side in layer.view()]
    fused = extend_fused(
        llama.decoder, first, [llama.candidate(ids, BOS) for ids in CHUNKS[1:]], selector, llama.source
    )
    assert fused.cache is first.cache
    after = [side[:, :, :stand] for layer in fused.cache.buffers for side in layer.view()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not fused.recomputed[:stand].any()


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_hole_in_a_later_round_is_computed_in_place(llama: Case, name: str) -> None:
    fused = in_rounds(llama, LOSSLESS[name], holes=[CHUNKS[1], CHUNKS[3]])
    assert [segment.status for segment in fused.plan.chunks] == ["hit", "miss", "hit", "miss"]
    assert_full(llama, fused.plan.ids, fused.logits)


@pytest.mark.some(3)
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.parametrize("name", ["reuse", "epic", "blend", "infoflow", "union"])
def test_damage_met_in_a_later_round(llama: Case, name: str, layer: int) -> None:
    selector = SELECTORS[name]()
    fused = in_rounds(llama, selector, SpySource(llama.source, before=missing_at(layer, 2)))
    assert [one.reason for one in fused.plan.chunks if one.status == "miss"] == [f"damaged at layer {layer}"]
    assert distance(fused.logits, in_rounds(llama, selector, holes=[CHUNKS[1]]).logits) <= 1e-4


def test_a_slow_record_of_a_later_round_writes_nothing_into_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends after it, and its buffers are given up: those of the resident rows with them."""
    one = new_case("llama")
    monkeypatch.setattr(SlowSource, "release", threading.Event(), raising=False)
    expected = in_rounds(one, Reuse(), holes=[CHUNKS[1]], later=LATER[:1])
    fused = in_rounds(one, Reuse(), SlowSource(one.kept), later=LATER[:1], patience=0.05)
    before = [side.clone() for layer in fused.cache.buffers for side in layer.view()]
    SlowSource.release.set()
    join_loaders()
    after = [side for layer in fused.cache.buffers for side in layer.view()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert fused.plan.chunks[1].reason.startswith("slow")
    assert distance(fused.logits, expected.logits) <= 1e-4


def test_the_prefix_may_be_lost(llama: Case) -> None:
    plan = llama.plan(FIRST, lead_in=BOS)
    fused = llama.fuse(plan.without(plan.segments[0], "lost"), Reuse(), reserve=100)
    now = extend_fused(llama.decoder, fused, [llama.candidate(CHUNKS[1], BOS)], Reuse(), llama.source)
    counts = joined(fused, now).tokens
    assert counts.fresh == len(PREFIX) + len(QUESTION)
    assert counts.prompt == counts.reused + counts.fresh
