"""Plans of prompts: positions of segments, and which are exact; and the controller's decisions, from made-up speeds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtool.core.cache.identity import ids_digest
from kvtool.core.fusion.plan import (
    Candidate,
    LoadSpeed,
    Part,
    PassSpeed,
    Plan,
    PromptRows,
    Span,
    Speeds,
    build_plan,
    fit,
    fit_pass,
    read_numbers,
)
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.query.auto import NOISE, Decision, decide, hidden_ratio

PREFIX, A, B, QUESTION = (0, 1, 2), (10, 11, 12, 13), (20, 21), (30, 31)


def stored(ids: tuple[int, ...], behind: tuple[int, ...]) -> Candidate:
    return Candidate(ids, bytes(ids), ids_digest(behind), "raw")


def statuses(plan: Plan) -> list[str]:
    return [segment.status for segment in plan.segments]


def test_segments_stand_one_after_another() -> None:
    plan = build_plan(stored(PREFIX, ()), [stored(A, PREFIX), stored(B, PREFIX)], QUESTION)
    assert [(segment.start, segment.stop) for segment in plan.segments] == [(0, 3), (3, 7), (7, 9), (9, 11)]
    assert plan.ids == [*PREFIX, *A, *B, *QUESTION]
    assert plan.length == 11
    assert plan.mask("fresh").nonzero()[:, 0].tolist() == [9, 10]


NEIGHBOURS = [stored(A, PREFIX), stored(B, (*PREFIX, *A))]
LOST = Candidate(PREFIX, reason="not stored")


@pytest.mark.parametrize(
    ("prefix", "chunks", "expected"),
    [
        (stored(PREFIX, ()), [stored(A, PREFIX), stored(B, PREFIX)], ["exact", "exact", "hit"]),
        *(
            (stored(PREFIX, ()), [stored(A, behind), stored(B, behind)], ["exact", "hit", "hit"])
            for behind in ((), (0,), (0, 1), (1, 2), (0, 1, 2, 3))
        ),
        (stored(PREFIX, ()), NEIGHBOURS, ["exact", "exact", "exact"]),
        (stored(PREFIX, ()), NEIGHBOURS[::-1], ["exact", "hit", "hit"]),
        (Candidate((*PREFIX, 3), reason="not stored"), [stored(A, PREFIX)], ["miss", "hit"]),
        # Rows are full prefill's whether the segments before them were read or are computed in place.
        (LOST, [stored(A, PREFIX), stored(B, PREFIX)], ["miss", "exact", "hit"]),
    ],
)
def test_a_chunk_is_exact_after_its_own_lead_in_only(
    prefix: Candidate, chunks: list[Candidate], expected: list[str]
) -> None:
    plan = build_plan(prefix, chunks, QUESTION)
    assert statuses(plan) == [*expected, "fresh"]
    assert plan.segments[0].reason == prefix.reason


def test_the_rest_of_a_chunk_is_never_exact() -> None:
    """Its rows saw the chunk's beginning, which the prompt does not have."""
    whole = stored(A, PREFIX)
    for first, status in ((0, "exact"), (1, "hit")):
        part = replace(whole, ids=A[first:3], part=Part(first, 3, len(A)))
        assert statuses(build_plan(stored(PREFIX, ()), [part], QUESTION)) == ["exact", status, "fresh"]


def test_giving_up_a_record_leaves_the_rest() -> None:
    plan = build_plan(stored(PREFIX, ()), [stored(A, PREFIX), stored(A, PREFIX)], QUESTION)
    without = plan.without(plan.segments[2], "damaged")
    assert statuses(without) == ["exact", "exact", "miss", "fresh"]
    assert without.segments[2].reason == "damaged"
    assert without.ids == plan.ids


def test_a_prompt_without_chunks_or_prefix() -> None:
    plan = build_plan(stored((), ()), [], QUESTION)
    assert plan.ids == list(QUESTION)
    assert plan.chunks == ()


LAYERS, CHUNK = 30, 256
PASS = PassSpeed(fixed=0.02, row=1e-3, key=1e-7)
SPANS = (Span(40, "exact", "raw"), *[Span(CHUNK, "hit", "raw")] * 8, Span(20, "fresh"))
FLOOR = 0.15


def speeds(token: float = 1e-5, *, own_memory: bool = True, busy: float = 1.0, **others: float) -> Speeds:
    loads = {"raw": LoadSpeed(0.0, token, busy, 1e9)}
    loads |= {name[1:]: LoadSpeed(0.0, one, busy, 1e9) for name, one in others.items()}
    return Speeds(PASS, loads, LAYERS, cores=4, threads=4, own_memory=own_memory)


def at(level: str) -> tuple[Span, ...]:
    return tuple(replace(span, level=level) if span.status == "hit" else span for span in SPANS)


def mode(name: str, ratio: float = FLOOR) -> Selector:
    return SELECTORS[name]().with_amount(ratio)


LOSSLESS = [kind() for kind in SELECTORS.values() if kind.lossless]


def choose(spans: tuple[Span, ...] = SPANS, with_speeds: Speeds | None = None, before_s: float = 0.0) -> Decision:
    return decide({"raw": spans}, with_speeds or speeds(), mode("union"), LOSSLESS, before_s)


def seconds(prompt: PromptRows, name: str, ratio: float | None = None) -> float:
    selector = SELECTORS[name]() if ratio is None else mode(name, ratio)
    return prompt.seconds(selector.cost(prompt))


@pytest.mark.parametrize("name", ["union", "infoflow", "blend"])
@pytest.mark.parametrize("own_memory", [True, False])
def test_slower_loading_leaves_room_for_more_recompute(name: str, own_memory: bool) -> None:
    tokens = [10.0**-exponent for exponent in (8, 6, 5, 4.5, 4, 3.5, 3.2, 3, 2)]
    found = [hidden_ratio(PromptRows(SPANS, speeds(token, own_memory=own_memory)), mode(name)) for token in tokens]
    assert found == sorted(found)
    assert found[0] == FLOOR
    assert found[-1] > FLOOR
    assert all(FLOOR <= ratio <= 1 for ratio in found)


@pytest.mark.parametrize("name", ["union", "blend"])
def test_the_ratio_is_the_largest_that_hides(name: str) -> None:
    with_speeds = speeds(3e-4)
    prompt = PromptRows(SPANS, with_speeds)
    ratio = hidden_ratio(prompt, mode(name))
    allowed = seconds(prompt, name, FLOOR) + NOISE * prompt.load("leading", "hit").seconds
    assert FLOOR < ratio < 1
    assert seconds(prompt, name, ratio) <= allowed
    assert seconds(prompt, name, ratio + 2 / (8 * CHUNK)) > allowed


def test_blend_computes_beside_loading_and_union_behind_it() -> None:
    """The paper's overlap: where loading takes longest, all of blend's recompute hides, and none of union's does."""
    prompt = PromptRows(SPANS, speeds(1e-3))
    load = prompt.load("leading", "hit").seconds
    assert load < seconds(prompt, "blend", 0.15) < load * 1.02
    assert seconds(prompt, "union", 0.15) > load + PASS.row * 0.15 * 8 * CHUNK


@pytest.mark.parametrize("floor", [0.0, 0.02, 0.15, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("token", [0.0, 1e-5, 1e-3])
def test_never_below_the_floor_and_never_above_one(floor: float, token: float) -> None:
    ratio = hidden_ratio(PromptRows(SPANS, speeds(token)), mode("union", floor))
    assert floor <= ratio <= 1


EXACT = (Span(40, "exact", "raw"), Span(CHUNK, "exact", "raw"), Span(20, "fresh"))
HOLES = tuple(Span(span.tokens, "fresh" if span.status == "fresh" else "miss") for span in SPANS)


@pytest.mark.parametrize(
    ("spans", "with_speeds", "expected"),
    [
        (SPANS, speeds(), "union"),
        (SPANS, speeds(1.0), "full"),  # a store this slow is not worth it
        (SPANS, replace(speeds(1e-4), passes=PassSpeed(1e-3, 1e-7, 0.0)), "full"),
        (HOLES, speeds(), "prefix"),  # computed and stored; full prefill would leave the holes
        ((Span(0, "miss"), Span(20, "fresh")), speeds(), "full"),
        (EXACT, speeds(), "prefix"),
    ],
    ids=["usual", "slow store", "fast computing", "nothing cached", "no chunks", "all exact"],
)
def test_the_mode_that_is_chosen(spans: tuple[Span, ...], with_speeds: Speeds, expected: str) -> None:
    found = choose(spans, with_speeds)
    assert found.fusion == expected
    assert set(found.expected_ms) == {"full", "prefix", "union"}
    assert found.expected_ms[expected] == pytest.approx(min(found.expected_ms.values()))


def test_a_usual_prompt_is_recomputed_in_part() -> None:
    found = choose()
    assert found.level == "raw"
    assert found.ratio == pytest.approx(FLOOR, abs=0.01)
    assert found.expected_ms["union"] < found.expected_ms["prefix"] < found.expected_ms["full"]
    assert choose(with_speeds=speeds(0.0)).ratio == FLOOR
    slow = choose(with_speeds=speeds(1.0))
    assert (slow.ratio, slow.level) == (None, None)


def test_full_wins_a_tie_and_loses_by_more() -> None:
    spans = (Span(0, "miss"), *SPANS[1:])
    full = seconds(PromptRows(spans, speeds()), "full")
    fusions = []
    for token in (1e-4 * 1.02**step for step in range(200)):
        took = seconds(PromptRows(spans, speeds(token)), "union", FLOOR)
        fusions.append(choose(spans, speeds(token)).fusion)
        assert fusions[-1] == ("full" if full <= took * (1 + NOISE) else "union")
    assert set(fusions) == {"full", "union"}


def test_chunks_of_one_token() -> None:
    found = choose((Span(1, "exact", "raw"), *[Span(1, "hit", "raw")] * 3, Span(1, "fresh")))
    assert found.fusion in ("full", "prefix")  # one pass of five rows, or two of two
    assert hidden_ratio(
        PromptRows((Span(1, "hit", "raw"), Span(1, "hit", "raw"), Span(1, "fresh")), speeds()), mode("union", 0.5)
    )


def test_a_level_that_could_not_be_measured_is_a_hole() -> None:
    prompt = PromptRows(at("3"), speeds())
    assert (prompt.hits, prompt.context) == (0, 0)
    assert seconds(prompt, "union", FLOOR) == seconds(prompt, "prefix")


def test_what_came_before_counts() -> None:
    late, early = choose(before_s=0.1), choose()
    assert all(late.expected_ms[mode] == pytest.approx(early.expected_ms[mode] + 100) for mode in early.expected_ms)


@pytest.mark.parametrize(
    ("coarse", "expected"), [(1e-6, "2"), (1e-4 * (1 - NOISE / 10), "raw"), (1e-4, "raw"), (2e-4, "raw")]
)
def test_the_fastest_level_and_the_finer_one_of_a_tie(coarse: float, expected: str) -> None:
    found = decide({"raw": SPANS, "2": at("2")}, speeds(1e-4, l2=coarse), mode("union"), LOSSLESS)
    assert (found.fusion, found.level) == ("union", expected)
    assert set(found.level_ms) == {"raw", "2"}


def test_a_lossy_level_costs_exactness() -> None:
    """A chunk that is exact at raw is recomputed at a lossy level; prefix caching at raw is then as fast."""
    lossy = (Span(40, "exact", "raw"), Span(CHUNK, "hit", "2"), Span(20, "fresh"))
    found = decide({"raw": EXACT, "2": lossy}, speeds(1e-5, l2=1e-6), mode("union"), LOSSLESS)
    assert (found.fusion, found.level) == ("prefix", "raw")


def test_on_a_gpu_the_longer_counts() -> None:
    there = speeds(1e-3)
    load = there.load({"raw": 1000})
    assert load.seconds == pytest.approx(1.0)
    assert there.overlapped(load, 0.3) == pytest.approx(1.0 + 0.3 / LAYERS)
    assert there.overlapped(load, 3.0) == pytest.approx(3.0 + 1.0 / LAYERS)


def test_on_the_cpu_both_want_the_same_cores() -> None:
    here = speeds(1e-3, own_memory=False)
    load = here.load({"raw": 1000})
    assert here.overlapped(load, 3.0) == pytest.approx(3.0 + 1.0 / 4)  # one of four cores, for a second
    alone = replace(here, cores=1, threads=1)
    assert alone.overlapped(load, 3.0) == pytest.approx(4.0)
    spare = replace(here, cores=8)
    assert spare.overlapped(load, 3.0) == pytest.approx(3.0 + 1.0 / LAYERS)


def test_a_fit_finds_what_made_the_samples() -> None:
    shapes = [(32, 528), (128, 8256), (512, 131328), (128, 32832)]
    found = fit_pass([(rows, keys, PASS.seconds(rows, keys)) for rows, keys in shapes])
    for name in ("fixed", "row", "key"):
        assert getattr(found, name) == pytest.approx(getattr(PASS, name), rel=1e-6)


@pytest.mark.parametrize("seconds", [[1.0, 0.5, 0.25], [1e-3, 1e-3, 1e-3], [0.1, 0.11, 5.0]])
def test_a_fit_is_never_negative(seconds: list[float]) -> None:
    found = fit([(1, 32, 500), (1, 128, 8000), (1, 512, 130000)], seconds)
    assert all(value >= 0 and math.isfinite(value) for value in found)
    assert any(found)


def test_a_fit_of_one_sample() -> None:
    (fixed, token) = fit([(1, 10)], [0.5])
    assert fixed + 10 * token == pytest.approx(0.5)


@pytest.mark.parametrize("row", [None, {}, {"fixed": 1, "row": -1, "key": 0}, {"fixed": "x", "row": 1, "key": 0},
                                 {"fixed": float("nan"), "row": 1, "key": 0}])  # fmt: skip
def test_what_is_no_speed(row: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        read_numbers(PassSpeed, row)
