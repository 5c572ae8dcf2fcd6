"""The policies to compare with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvtool.core.streaming.fetch_state import Policy, Task, make_estimator
from samples.benchmarks.streaming.rules import CacheGenRule, Fixed, TextOnly
from samples.benchmarks.streaming.simulate import simulate
from samples.benchmarks.streaming.traces import LinkTrace
from tests.streaming.making import MB, Watched, steady, task, tasks, traces


def policy(name: str, one: Task) -> Policy:
    estimator = make_estimator("last")
    if name == "cachegen":
        return CacheGenRule(one, estimator)
    return TextOnly(one, estimator) if name == "text" else Fixed(one, estimator, name)


def test_one_level_for_all_whatever_the_link_does() -> None:
    one = task(chunks=3, objective=0.01)
    run = simulate(policy("2", one), one, steady(10))
    assert set(run.levels.values()) == {"2"}
    assert run.bytes == 3 * 4 * MB  # with the two that it refines
    assert run.met is False


def test_a_chunk_that_is_not_stored_at_the_level_is_text() -> None:
    one = task(chunks=3, l4=1)
    run = simulate(policy("2", one), one, steady(1000))
    assert run.text_tokens == 3000
    assert [row["decision"] for row in run.log] == ["text"] * 3


def test_text_alone_fetches_nothing() -> None:
    one = task(chunks=3, text=0.1, question=0.05)
    run = simulate(policy("text", one), one, steady(1000))
    assert (run.bytes, run.text_tokens, run.ready_s) == (0, 3000, 0)
    assert run.ttft_s == pytest.approx(0.35)


def test_cachegen_takes_the_finest_level_at_which_all_the_rest_is_expected_in_time() -> None:
    one = task(chunks=4, objective=0.5, question=0.0)
    run = simulate(policy("cachegen", one), one, steady(400), depth=1)
    # 50 MB/s: the middle level (4 MB) takes 0.08 s. 0.42 s are left, 18.9 MB by the estimate less its margin: 4 MB each
    # of three is in time, 7 MB is not. 0.34 s: 7 MB each of two is. 0.2 s: 9 MB, so 7 MB again.
    assert list(run.levels.values()) == ["2", "2", "1", "1"]
    assert run.met


def test_cachegen_sends_text_where_no_level_is_expected_in_time() -> None:
    one = task(chunks=3, objective=0.3, question=0.0)
    run = simulate(policy("cachegen", one), one, steady(100), depth=1)
    assert list(run.levels.values()) == ["2", None, None]


def test_cachegen_keeps_to_what_it_decided_when_the_link_drops() -> None:
    one = task(chunks=2, objective=0.5)
    watched = Watched(policy("cachegen", one))
    run = simulate(watched, one, LinkTrace("drop", "drop", ((0.0, 1000.0), (0.01, 1.0))))
    assert all(arrived for _, _, arrived, _ in watched.ended)
    assert not run.met


def test_without_an_objective_cachegen_takes_the_finest() -> None:
    one = task(chunks=2, objective=None)
    assert set(simulate(policy("cachegen", one), one, steady(100)).levels.values()) == {"lossless"}


@settings(max_examples=60, deadline=None)
@given(tasks(), traces())
def test_each_chunk_is_asked_for_at_most_once(one: Task, trace: LinkTrace) -> None:
    for name in ("cachegen", "3", "text"):
        watched = Watched(policy(name, one))
        run = simulate(watched, one, trace)
        chunks = [fetch.chunk for fetch in watched.asked]
        assert len(chunks) == len(set(chunks))
        assert run.bytes == sum(fetch.size for fetch in watched.asked)
        assert {row["chunk"] for row in run.log} == {ladder.chunk for ladder in one.ladders}
