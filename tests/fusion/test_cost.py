"""Cost of a mode as it states it: what the engine reads and computes."""

from __future__ import annotations

import pytest

from kvtool.core.fusion.cost import Cost, LoadSpeed, PassSpeed, PromptRows, Span, Speeds
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors import AUTO, MODES, REFERENCE, SELECTORS, WEIGHED
from tests.fusion.making import BOS, IDLE, LOSSLESS, PREFIX, SpySource, case

LAYERS = 4
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
