"""What a chunk can be fetched as."""

from __future__ import annotations

from hypothesis import given

from kvtool.core.streaming.ladder import Ladder, Part, Rung
from tests.streaming.making import ladders, nested


def test_a_nested_level_needs_what_it_refines() -> None:
    one = Ladder.of(0, 10, nested({"4": 5, "3": 7, "lossless": 100}))
    assert [rung.level for rung in one.rungs] == ["4", "3", "lossless"]
    assert one.missing(set(), one.rungs[1]) == 12
    assert one.missing({"4"}, one.rungs[1]) == 7
    assert one.missing({"4", "3"}, one.rungs[2]) == 100


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
