"""What the link is expected to carry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.errors import UsageError
from kvtool.core.streaming.estimate import PREDICTORS, make_estimator

SEEN = st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-3, 100)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", PREDICTORS)
@given(seen=SEEN)
def test_an_estimate_lies_between_what_was_seen(name: str, seen: list[tuple[int, float]]) -> None:
    one = make_estimator(name)
    assert one.bytes_per_second is None
    for size, seconds in seen:
        one.observe(size, seconds)
    rates = [size / seconds for size, seconds in seen]
    assert one.bytes_per_second is not None
    assert min(rates) * 0.999 <= one.bytes_per_second <= max(rates) * 1.001


def test_what_took_no_time_or_moved_nothing_says_nothing() -> None:
    for name in PREDICTORS:
        one = make_estimator(name)
        one.observe(10, 0.0)
        one.observe(0, 1.0)
        assert one.bytes_per_second is None


def test_each_predictor_weighs_in_its_own_way() -> None:
    found = {}
    for name in PREDICTORS:
        one = make_estimator(name)
        for size in (100, 100, 400):
            one.observe(size, 1.0)
        found[name] = one.bytes_per_second
    assert found == pytest.approx({"last": 400, "ewma": 250, "harmonic": 3 / (2 / 100 + 1 / 400)})


def test_an_unknown_predictor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        make_estimator("magic")
    assert "harmonic" in error.value.hint
