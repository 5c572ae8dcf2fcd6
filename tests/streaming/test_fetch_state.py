"""Levels of a chunk that can be fetched, and estimates of a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.streaming import Ladder, Part, Rung
from samples.benchmarks.streaming.predictors import PREDICTORS
from tests.streaming.making import ladders, nested


def test_a_nested_level_needs_what_it_refines() -> None:
    one = Ladder.of(0, 10, nested({"4": 5, "3": 7, "lossless": 100}))
    assert [rung.level for rung in one.rungs] == ["4", "3", "lossless"]
    absent = ((one.rungs[1], set()), (one.rungs[1], {"4"}), (one.rungs[2], {"4", "3"}))
    assert [sum(part.size for part in rung.absent(held)) for rung, held in absent] == [12, 7, 100]


def test_a_level_as_large_as_one_that_loses_no_more_is_dropped() -> None:
    raw, lossless = Rung("raw", 0.0, (Part("raw", 16),)), Rung("lossless", 0.0, (Part("lossless", 11),))
    wide = Rung("int8", 0.002, (Part("int8", 11),))
    assert Ladder.of(0, 1, [wide, raw, lossless]).rungs == (lossless,)


@given(ladders(0))
def test_every_step_is_larger_and_loses_less(one: Ladder) -> None:
    for below, above in zip(one.rungs, one.rungs[1:], strict=False):
        assert below.size < above.size
        assert below.loss > above.loss


def test_the_finest_level_that_is_whole_is_reached() -> None:
    one = Ladder.of(0, 10, nested({"4": 5, "3": 7}))
    assert [one.reached(held) for held in (set(), {"3"}, {"4"}, {"3", "4"})] == [-1, -1, 0, 1]


SEEN = st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-3, 100)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", PREDICTORS)
@given(seen=SEEN)
def test_an_estimate_lies_between_what_was_seen(name: str, seen: list[tuple[int, float]]) -> None:
    one = PREDICTORS[name]()
    assert one.bytes_per_second is None
    for size, seconds in seen:
        one.observe(size, seconds)
    rates = [size / seconds for size, seconds in seen]
    assert one.bytes_per_second is not None
    assert min(rates) * 0.999 <= one.bytes_per_second <= max(rates) * 1.001


def test_what_took_no_time_or_moved_nothing_says_nothing() -> None:
    for name in PREDICTORS:
        one = PREDICTORS[name]()
        one.observe(10, 0.0)
        one.observe(0, 1.0)
        assert one.bytes_per_second is None


def test_each_predictor_weighs_in_its_own_way() -> None:
    found = {}
    for name in PREDICTORS:
        one = PREDICTORS[name]()
        for size in (100, 100, 400):
            one.observe(size, 1.0)
        found[name] = one.bytes_per_second
    assert found == pytest.approx({"last": 400, "ewma": 250, "harmonic": 3 / (2 / 100 + 1 / 400)})
