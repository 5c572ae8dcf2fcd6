"""The adaptive policy: never later than text where text is in time, never a byte twice, finer while there is time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.streaming import Fetch, Ladder, Part, Rung, Task
from samples.benchmarks.streaming.predictors import PREDICTORS
from samples.benchmarks.streaming.simulate import meets, simulate
from samples.benchmarks.streaming.traces import LinkTrace
from tests.streaming.making import MB, Watched, adaptive, ladder, steady, task, tasks, traces

CHOICES = st.sampled_from(sorted(PREDICTORS)), st.integers(1, 4)


@settings(max_examples=150, deadline=None)
@given(tasks(), traces(), *CHOICES)
def test_the_objective_is_met_wherever_text_alone_would_meet_it(
    one: Task, trace: LinkTrace, predictor: str, depth: int
) -> None:
    run = simulate(adaptive(one, predictor), one, trace, depth)
    everything = frozenset(ladder.chunk for ladder in one.ladders)
    if one.compute(everything) <= one.objective:
        assert meets(run.ttft_s, one.objective)


@settings(max_examples=80, deadline=None)
@given(tasks(), traces(), *CHOICES)
def test_a_link_of_any_kind_costs_no_more_than_the_objective_and_twice_the_text(
    one: Task, trace: LinkTrace, predictor: str, depth: int
) -> None:
    run = simulate(adaptive(one, predictor), one, trace, depth)
    everything = frozenset(ladder.chunk for ladder in one.ladders)
    text = one.compute(everything)
    decodes = sum(one.decode(ladder.tokens, "4") for ladder in one.ladders)
    assert run.ttft_s <= one.objective + 2 * text + decodes + 1e-9


@settings(max_examples=80, deadline=None)
@given(tasks(), traces(), *CHOICES)
def test_nothing_is_fetched_twice_and_what_arrives_adds_up(
    one: Task, trace: LinkTrace, predictor: str, depth: int
) -> None:
    policy = Watched(adaptive(one, predictor))
    run = simulate(policy, one, trace, depth)
    asked = [(fetch.chunk, part.level) for fetch in policy.asked for part in fetch.parts]
    assert len(asked) == len(set(asked))
    assert len(policy.ended) == len(policy.asked)
    arrived = [fetch for fetch, _, there, _ in policy.ended if there]
    assert run.bytes == sum(part.size for fetch in arrived for part in fetch.parts)
    for rungs in one.ladders:
        chunk = rungs.chunk
        held = {part.level for fetch in arrived if fetch.chunk == chunk for part in fetch.parts}
        at = rungs.reached(held)
        assert run.levels[chunk] == (rungs.rungs[at].level if at >= 0 else None)
        rows = [row for row in run.log if row["chunk"] == chunk]
        there = [row["level"] for row in rows if row["decision"] in ("base", "refinement")]
        assert there == [fetch.level for fetch in arrived if fetch.chunk == chunk]
        assert rows if there else rows[-1]["decision"].endswith(("text", "text stands"))


@settings(max_examples=80, deadline=None)
@given(tasks(), traces(), *CHOICES)
def test_waiting_ends_at_the_latest_when_the_policy_says(
    one: Task, trace: LinkTrace, predictor: str, depth: int
) -> None:
    policy = Watched(adaptive(one, predictor))
    simulate(policy, one, trace, depth)
    for _, ended, arrived, limit in policy.ended:
        assert ended <= limit + 1e-9 if arrived else ended >= limit - 1e-9


@settings(max_examples=150, deadline=None)
@given(tasks(), st.lists(st.tuples(st.floats(0.001, 2), st.booleans()), min_size=1, max_size=12), st.integers(1, 4))
def test_fetches_that_fail_or_overtake_each_other_cost_no_objective(
    one: Task, fates: list[tuple[float, bool]], depth: int
) -> None:
    """Not one link but many: each fetch takes its own time, or fails after it."""
    policy = adaptive(one)
    now, decoded_at, sent = 0.0, 0.0, 0
    outstanding: list[tuple[Fetch, float, float, bool]] = []
    while True:
        while len(outstanding) < depth and (fetch := policy.next(now)) is not None:
            seconds, works = fates[sent % len(fates)]
            outstanding.append((fetch, now, now + seconds, works))
            sent += 1
        if not outstanding:
            break
        ends = [
            (min(end, max(policy.give_up_at(fetch), now)), number)
            for number, (fetch, _, end, _) in enumerate(outstanding)
        ]
        now, number = min(ends)
        fetch, started, end, works = outstanding.pop(number)
        arrived = works and end <= now
        policy.done(fetch, started, now, arrived)
        if arrived:
            decoded_at = max(decoded_at, now) + one.decode(one.ladders[fetch.chunk].tokens, fetch.level)
    text = frozenset(chunk for chunk, level in policy.levels.items() if level is None)
    if one.compute(frozenset(policy.levels)) <= one.objective:
        assert meets(max(now, decoded_at) + one.compute(text), one.objective)


def test_bases_come_first_then_each_step_in_the_order_of_relevance() -> None:
    one = task(chunks=3, objective=20.0)
    policy = Watched(adaptive(one))
    simulate(policy, one, steady(100), depth=1)
    steps = ["4", "3", "2", "1", "lossless"]
    assert [(fetch.level, fetch.chunk) for fetch in policy.asked] == [(level, n) for level in steps for n in range(3)]


def test_what_is_here_already_is_refined_over_a_link_that_nothing_is_known_of() -> None:
    here = Ladder(0, 100, (Rung("2", 0.02, ()), Rung("1", 0.002, (Part("1", 1_000_000),))))
    one = Task((here,), lambda text: 0.1, 1.0)
    for mbps, level in ((100, "1"), (1, "2")):
        run = simulate(adaptive(one), one, steady(mbps))
        assert run.levels == {0: level}
        assert run.met


def test_a_finer_level_is_reached_on_a_faster_link() -> None:
    losses = [simulate(adaptive(one := task()), one, steady(mbps)).loss for mbps in (100, 200, 400, 1000, 4000)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)


def test_a_link_that_stops_after_the_bases_leaves_them() -> None:
    one = task(chunks=4)
    run = simulate(adaptive(one), one, LinkTrace("stops", "drop", ((0.0, 1000.0), (0.04, 0.0), (9.0, 1.0))))
    assert run.met
    assert set(run.levels.values()) == {"4", "3"}
    assert [row["decision"] for row in run.log if row["decision"].startswith("gave up")] == [
        "gave up refinement: 4 stands"
    ] * 2


def test_text_for_the_rest_once_the_link_is_seen_to_be_slower_than_computing() -> None:
    one = task(chunks=4, objective=3.0, text=0.01)
    policy = Watched(adaptive(one))
    run = simulate(policy, one, steady(10))
    assert run.met
    assert {fetch.chunk for fetch in policy.asked} == {0, 1}  # before there was an estimate
    assert run.text_tokens == 2000


def test_a_dead_link_is_given_up_for_text_in_time() -> None:
    one = task(chunks=4, objective=1.0, text=0.2, question=0.05)
    run = simulate(adaptive(one), one, LinkTrace("dead", "dead", ((0.0, 0.0), (60.0, 1.0))))
    assert run.ttft_s == one.objective
    assert run.text_tokens == 4000


def test_where_neither_is_in_time_the_sooner_one() -> None:
    slow, fast = task(objective=0.1, text=10.0), task(objective=0.1, text=0.1)
    assert simulate(adaptive(slow), slow, steady(10)).text_tokens == 0
    run = simulate(adaptive(fast), fast, steady(10))
    assert run.text_tokens == 4000
    assert run.ttft_s <= 2 * fast.compute(frozenset(range(4)))


def test_a_refinement_that_would_wait_too_long_for_its_decoding_is_given_up() -> None:
    policy = adaptive(task(chunks=4, objective=1.0, text=0.2, question=0.05, decode=lambda tokens, level: 0.1))
    for number in range(4):
        base = policy.next(0.0)
        assert base is not None
        policy.done(base, 0.01 * number, 0.01 * (number + 1), True)  # all decoded at 0.41
    first, second = policy.next(0.04), policy.next(0.04)
    assert first is not None
    assert second is not None
    assert policy.give_up_at(second) == pytest.approx(0.85)
    policy.done(first, 0.04, 0.8, True)  # decoded at 0.9; the second would be at 1.0, too late
    assert policy.give_up_at(second) == 0.8


def test_a_chunk_without_levels_and_one_that_decodes_too_slowly_are_text() -> None:
    bare = Task((ladder(0), ladder(1, tokens=10, l9=1)), lambda texts: 0.1 * len(texts), 1.0)
    assert simulate(adaptive(bare), bare, steady(5000)).levels[0] is not None
    slow = task(decode=lambda tokens, level: 1.0)
    assert simulate(adaptive(slow), slow, steady(5000)).text_tokens == 4000


def test_two_requests_are_outstanding_before_the_first_estimate() -> None:
    policy = adaptive(task())
    first, second = policy.next(0.0), policy.next(0.0)
    assert first is not None
    assert second is not None
    assert (first.chunk, second.chunk) == (0, 1)
    assert first.estimated_bytes_per_second is None
    policy.done(first, 0.0, 0.01, True)
    third = policy.next(0.01)
    assert third is not None
    assert third.estimated_bytes_per_second == MB / 0.01
    assert policy.log[0]["measured_mbps"] == 800
