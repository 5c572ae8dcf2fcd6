"""Both ends: what the link would bring too late is computed meanwhile, and that costs no objective."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.streaming import Ladder, Task
from kvtool.core.streaming.policy import MEANWHILE
from samples.benchmarks.streaming.predictors import PREDICTORS
from samples.benchmarks.streaming.simulate import meets, simulate
from samples.benchmarks.streaming.traces import LinkTrace
from tests.streaming.making import MB, adaptive, both, ladder, steady, task, tasks, traces

CHOICES = st.sampled_from(sorted(PREDICTORS)), st.integers(1, 4)
DEAD = LinkTrace("dead", "dead", ((0.0, 0.0), (60.0, 1.0)))


@st.composite
def alone(draw: Any) -> Task:
    """Draw tasks of which most chunks may be computed separately, at a higher or lower cost than in the pass."""
    one = draw(tasks())
    tokens = {rungs.chunk: rungs.tokens for rungs in one.ladders}
    fixed, token = draw(st.floats(0, 0.05)), draw(st.floats(0, 5e-4))
    never = draw(st.sets(st.sampled_from(sorted(tokens)), max_size=1))
    return replace(one, alone=lambda chunk: math.inf if chunk in never else fixed + token * tokens[chunk])


@settings(max_examples=100, deadline=None)
@given(alone(), traces(), *CHOICES, st.sampled_from((0.3, 1.0, 4.0)))
def test_the_objective_is_met_wherever_text_alone_would_meet_it_however_slow_the_processor(
    one: Task, trace: LinkTrace, predictor: str, depth: int, slower: float
) -> None:
    run = simulate(both(one, predictor), one, trace, depth, slower)
    if one.compute(frozenset(rungs.chunk for rungs in one.ladders)) <= one.objective:
        assert meets(run.ttft_s, one.objective)


@settings(max_examples=50, deadline=None)
@given(alone(), traces(), *CHOICES)
def test_each_chunk_is_computed_once_at_most_and_told_once(
    one: Task, trace: LinkTrace, predictor: str, depth: int
) -> None:
    policy = both(one, predictor)
    run = simulate(policy, one, trace, depth)
    told = [row["chunk"] for row in run.log if row["compute_ms"] is not None]
    assert len(told) == len(set(told))
    assert {row["chunk"] for row in run.log if row["decision"] == MEANWHILE} == policy.computed
    assert all(run.levels[chunk] is None for chunk in policy.computed)
    assert {row["chunk"] for row in run.log} == {rungs.chunk for rungs in one.ladders}


def computing(chunks: int = 4, seconds: float = 0.2, **more: Any) -> Task:
    return replace(task(chunks, **more), alone=lambda chunk: seconds)


def test_they_meet() -> None:
    """A chunk takes the link and the processor 0.2 s each: two of four from each end."""
    one = computing(objective=0.3, text=0.4, l1=10)
    run = simulate(both(one), one, steady(400), depth=1)
    assert run.levels == {0: "1", 1: "1", 2: None, 3: None}
    assert run.ready_s == pytest.approx(0.4, abs=0.05)
    assert run.bytes == 20 * MB
    assert run.vain_tokens == 0


def test_a_fast_link_leaves_the_processor_idle_and_a_dead_one_leaves_it_all() -> None:
    one = computing(objective=0.01, text=0.4, l1=10)
    run = simulate(both(one), one, steady(20_000))
    assert (run.text_tokens, run.vain_tokens) == (0, 0)
    run = simulate(both(one), one, DEAD)
    assert run.levels == dict.fromkeys(range(4))
    assert run.ready_s < 4 * 0.2 + 0.2  # the link is given that long to begin
    assert run.bytes == 0


def test_of_two_that_race_the_later_one_is_given_up() -> None:
    one = computing(2, objective=0.3, text=0.4, l1=10)
    stalls = LinkTrace("t", "t", ((0.0, 400.0), (0.25, 0.0), (9.0, 400.0)))
    run = simulate(both(one), one, stalls, depth=2)
    assert run.levels == {0: "1", 1: None}
    assert "gave up base: text stands" in {row["decision"] for row in run.log}
    comes_back = LinkTrace("t", "t", ((0.0, 0.0), (0.3, 10_000.0)))
    run = simulate(both(one), one, comes_back, depth=2)
    assert run.levels == {0: "1", 1: None}
    assert run.vain_tokens == 1000  # the other's was begun, and stopped when the link brought it
    assert run.ready_s == pytest.approx(0.308)


def test_under_an_objective_what_is_computed_replaces_the_coarsest_last() -> None:
    """0.75 s for two to three chunks of 0.2 s; the link has brought level 4 of all by then."""
    one = computing(objective=0.8, text=1.0)
    run = simulate(both(one), one, steady(100), depth=1)
    assert run.met
    assert [level is None for level in run.levels.values()] == [False, True, True, True]
    assert run.loss < simulate(adaptive(one), one, steady(100), depth=1).loss


def test_a_link_that_is_too_slow_for_all_is_in_time_for_some() -> None:
    """Text takes 0.85 s and four bases 0.8 s: neither is in time, both together are."""
    one = computing(objective=0.6, l4=5)
    assert not simulate(adaptive(one), one, steady(200)).met
    assert simulate(both(one), one, steady(200)).met


def test_nothing_is_begun_that_cannot_be_in_time() -> None:
    one = computing(objective=0.5, seconds=0.6, text=1.0)
    assert all(row["compute_ms"] is None for row in simulate(both(one), one, steady(400)).log)


def test_a_processor_that_is_slower_than_expected_is_expected_to_stay_so() -> None:
    one = computing(5, objective=1.0, seconds=0.2, text=2.0)
    policy = both(one)
    run = simulate(policy, one, steady(400), slower=1.6)
    told = [row for row in run.log if row["compute_ms"] is not None]
    assert [row["decision"] for row in told] == [MEANWHILE] * 2  # 0.64 s; a third would take 0.32 again
    assert told[0]["compute_ms"] == pytest.approx(320)


def test_what_is_stored_nowhere_is_computed_first() -> None:
    hole = Ladder(9, 500, ())
    one = Task((ladder(0), hole, ladder(1)), lambda text: 0.2 * len(text), 2.0, alone=lambda chunk: 0.1)
    policy = both(one)
    run = simulate(policy, one, steady(5000))
    assert next(row for row in run.log if row["decision"] == MEANWHILE)["chunk"] == 9
    assert 9 in policy.computed


def test_what_failed_is_not_begun_again() -> None:
    policy = both(computing(2, objective=1.0, l1=10))
    assert policy.next(0.0) is not None
    assert policy.next(0.0) is not None
    begun = policy.compute(0.9)
    assert begun is None or policy.stop_at(begun) is not None
    policy = both(computing(3, objective=2.0, text=0.3))
    assert policy.next(0.0) is not None
    chunk = policy.compute(0.0)
    assert chunk == 2
    assert policy.compute(0.0) is None  # one at a time
    policy.ended(chunk, 0.01, 0.01, whole=False)
    assert policy.compute(0.01) == 1
    assert policy.log[0]["decision"] == "gave up computing: text stands"
