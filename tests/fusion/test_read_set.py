"""Windowed layers are read only as far as a computed row can see, and what is not read never matters."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.fusion.engine import fuse_into
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from tests.families import WINDOWED, tiny_model
from tests.fusion.making import BOS, Case, Ids, SpySource, assert_full, case, decoder_of, lossless, plain_text, tokens

# Prefix 9, then chunks of 40 and a question of 7: many windows of 12 to 32, and few of 96.
MANY: tuple[Ids, ...] = tuple(tokens(40, 70 + number) for number in range(8))


def seen_from(one: Case, plan: Plan, rows: list[int], layer: int) -> set[int]:
    """Starts of the cached segments that rows see through a layer's window, each asked for itself."""
    window = one.decoder.kinds[layer].window or plan.length
    return {
        s.start
        for s in plan.cached
        for row in rows
        if any(row - window < place <= row for place in range(s.start, s.stop))
    }


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("selector", [Reuse(), Epic(4), Epic(1000)], ids=repr)
@pytest.mark.parametrize("holes", [(), (3,)], ids=["", "hole"])
def test_records_are_read_that_a_computed_row_sees(name: str, selector: Selector, holes: tuple[int, ...]) -> None:
    one = case(name)
    plan = one.plan(MANY, lead_in=BOS, holes=holes)
    spy = SpySource(one.source)
    fused = one.fuse(plan, selector, spy)
    computed = (selector.rows(plan) | plan.mask("miss", "fresh")).nonzero()[:, 0].tolist()
    whole = {s.start for s in plan.cached if not selector.rows(plan)[s.start : s.stop].all()}
    asked = {layer: set(starts) for layer, starts in spy.reads}
    for layer in range(len(one.decoder.layers)):
        wanted = seen_from(one, plan, computed, layer) & whole
        assert asked.get(layer, set()) == wanted
        assert {segment.start for segment in fused.read_set.skipped[layer]} == whole - wanted
    told = fused.read_set.to_json()
    assert told["records_read"] + told["records_spared"] == len(whole) * len(one.decoder.layers)


def test_reuse_reads_a_fraction() -> None:
    """Three of four layers see 16 tokens: of nine records each reads one, or two."""
    one = case("gpt-oss")
    told = one.fuse(one.plan(MANY, lead_in=BOS), Reuse()).read_set.to_json()
    assert told == {"records_read": 9 + 3 * 1, "records_spared": 3 * 8}


@pytest.mark.parametrize("name", SELECTORS)
def test_a_mode_that_chooses_on_the_way_reads_what_it_may_choose(name: str) -> None:
    one, selector = case("gemma2"), SELECTORS[name]()
    plan = one.plan(MANY, lead_in=BOS)
    if selector.asked(plan, 4) or selector.narrowing(plan, 4):
        assert all(len(read) >= len(plan.chunks) for read in one.fuse(plan, selector).read_set.read)


@pytest.mark.parametrize("kernel", ["", "eager", "sdpa"])
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("selector", [Reuse(), Epic(4), Epic(4, shift=False)], ids=repr)
def test_what_was_never_read_may_be_anything(
    name: str, selector: Selector, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the tokens that follow: memory that held no numbers gives the same as memory that held zeros."""
    monkeypatch.setenv("KVTOOL_ATTENTION", kernel)
    one = case(name)
    plan = one.plan(MANY, lead_in=BOS, holes=(5,))
    found = []
    for filling in (0.0, torch.nan):
        cache = one.decoder.new_cache(plan.length + 8)
        for buffer in cache.buffers:
            buffer.keys.fill_(filling)
            buffer.values.fill_(filling)
        fused = fuse_into(cache, one.decoder, plan, selector, one.source)
        found.append(torch.cat([fused.logits[None], one.decoder.extend(tokens(8, 1), cache)]))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("mode", ["full", "epic", "union", "blend"])
def test_prompts_of_many_windows(name: str, mode: str) -> None:
    """Recompute-all is full prefill, and 32 tokens of its answer are those of plain `transformers`."""
    one, selector = case(name), lossless(mode)
    assert selector is not None
    plan = one.plan(MANY, lead_in=BOS)
    fused = one.fuse(plan, selector, reserve=32)
    assert_full(one, plan.ids, fused.logits)
    ids, logits = [], fused.logits
    for _ in range(32):
        ids.append(int(logits.argmax()))
        logits = one.decoder.extend(ids[-1:], fused.cache)[-1]
    wanted = plain_text(name, "float32", tuple(plan.ids), 32)
    assert tuple(ids[: len(wanted)]) == wanted


def test_positions_beyond_the_window_at_ingest() -> None:
    """A chunk longer than the window: its last rows see neither its first ones nor the lead-in."""
    one = case("gpt-oss")
    long = tokens(90, 3)
    plan = one.plan([long], lead_in=BOS)
    assert max(kind.window or 0 for kind in one.decoder.kinds) < len(long)
    again = Case("gpt-oss", "float32", decoder_of(tiny_model("gpt-oss"), "cpu"))
    exact = again.plan([long])
    assert exact.chunks[0].status == "exact"
    assert_full(again, exact.ids, again.fuse(exact, Reuse()).logits)
    assert plan.chunks[0].status == "hit"
