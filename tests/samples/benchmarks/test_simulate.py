"""The link, decoding at the same time, and the pass after it, computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.streaming.fetch_state import Fetch, Task, make_estimator
from samples.benchmarks.streaming.rules import Fixed
from samples.benchmarks.streaming.simulate import Outcome, mean_loss, simulate
from samples.benchmarks.streaming.traces import LinkTrace
from tests.streaming.making import LOSSES, MB, adaptive, ladder, steady, task, tasks, traces


def fixed(one: Task, trace: LinkTrace, depth: int = 2) -> Outcome:
    return simulate(Fixed(one, make_estimator("last"), "4"), one, trace, depth)


def test_a_requests_latency_passes_while_the_one_before_is_transferred() -> None:
    one = task(chunks=4, objective=None, question=0.0)  # 1 MB each: 10 ms at 800 Mbit/s
    assert fixed(one, steady(800, latency_ms=8)).ttft_s == pytest.approx(0.048)
    assert fixed(one, steady(800, latency_ms=8), depth=1).ttft_s == pytest.approx(4 * 0.018)
    # A longer latency than two transfers: two requests a round.
    assert fixed(one, steady(800, latency_ms=30)).ttft_s == pytest.approx(0.04 + 0.01 + 0.03 + 0.01)


def test_decoding_runs_beside_fetching() -> None:
    one = task(chunks=4, objective=None, question=0.0, decode=lambda tokens, level: tokens * 4e-6)  # 4 ms a chunk
    assert fixed(one, steady(800)).ttft_s == pytest.approx(0.044)
    slow = task(chunks=4, objective=None, question=0.0, decode=lambda tokens, level: 0.025)
    assert fixed(slow, steady(800)).ttft_s == pytest.approx(0.01 + 4 * 0.025)


def test_a_rate_that_changes_in_mid_transfer() -> None:
    trace = LinkTrace("t", "t", ((0.0, 800.0), (0.005, 0.0), (0.105, 80.0)))
    assert trace.end(0.0, MB) == pytest.approx(0.155)
    assert trace.end(0.2, MB) == pytest.approx(0.3)
    assert [trace.mbps(second) for second in (0.0, 0.005, 0.2)] == [800.0, 0.0, 80.0]


def test_what_is_given_up_frees_the_link() -> None:
    class GivesUp(Fixed):
        def give_up_at(self, fetch: Fetch) -> float | None:
            return 0.004 if fetch.chunk == 0 else None

    one = task(chunks=2, objective=None, question=0.0, text=0.5)
    run = simulate(GivesUp(one, make_estimator("last"), "4"), one, steady(800))
    assert run.levels == {0: None, 1: "4"}
    assert run.ready_s == pytest.approx(0.014)
    assert run.ttft_s == pytest.approx(0.514)
    assert run.log[0]["decision"] == "gave up base: text stands"
    assert run.log[0]["measured_mbps"] is None


def test_loss_is_the_mean_over_tokens_and_text_loses_nothing() -> None:
    one = Task((ladder(0, tokens=300), ladder(1, tokens=100), ladder(2, tokens=400)), lambda texts: 0.0)
    assert mean_loss(one, {0: "4", 1: "2", 2: None}) == pytest.approx((300 * LOSSES["4"] + 100 * LOSSES["2"]) / 800)


def test_jitter_is_the_same_in_every_run() -> None:
    one = task()
    trace = LinkTrace("t", "t", ((0.0, 500.0),), latency_ms=5, jitter_ms=50, seed=3)
    first, second = (simulate(adaptive(one), one, trace) for _ in range(2))
    assert first == second
    assert first != simulate(adaptive(one), one, LinkTrace("t", "t", ((0.0, 500.0),), 5, 50, seed=4))


@settings(max_examples=60, deadline=None)
@given(traces(), st.floats(0, 3), st.integers(1, 10**8), st.integers(1, 10**8))
def test_transfers_take_as_long_in_one_as_in_two(trace: LinkTrace, start: float, one: int, two: int) -> None:
    assert trace.end(trace.end(start, one), two) == pytest.approx(trace.end(start, one + two), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(tasks(st.none()), traces())
def test_a_deeper_queue_is_never_later_without_jitter(one: Task, trace: LinkTrace) -> None:
    still = LinkTrace("t", "t", trace.steps, trace.latency_ms)
    found = [fixed(one, still, depth).ttft_s for depth in (1, 2, 5)]
    assert found[0] >= found[1] - 1e-9
    assert found[1] >= found[2] - 1e-9
