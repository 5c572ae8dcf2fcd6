"""The tables that come with kvtool: what they hold, and that they are the ones records were written with."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.codec.cachegen import cheapest, shipped
from kvtool.core.codec.fit import bell, frequencies
from kvtool.core.codec.rans.tables import ALPHABET, ESCAPE, SLOTS, ZERO

DIGEST = "b9c0f1000a6b8c4edce0785ebc46f1cc"  # of version 1: records name its tables by number


def test_the_shipped_tables_never_change() -> None:
    assert hashlib.blake2b(shipped().frequencies.astype("<u2").tobytes(), digest_size=16).hexdigest() == DIGEST
    assert shipped() is shipped()


def test_they_are_what_the_formula_gives() -> None:
    """Up to a slot: exp and erf may differ by a last bit from machine to machine."""
    zeros = np.zeros(ALPHABET)
    zeros[ZERO] = 1.0
    ours = np.stack([frequencies(weights) for weights in (zeros, *map(bell, np.geomspace(0.12, 42, 48)))])
    assert ours.shape == shipped().frequencies.shape == (49, ALPHABET)
    assert ours.dtype == np.uint16
    assert np.abs(ours.astype(int) - shipped().frequencies).max() <= 1
    assert (ours != shipped().frequencies).sum() < 100


@pytest.mark.slow
@given(
    weights=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=ALPHABET, max_size=ALPHABET),
    few=st.integers(0, ALPHABET),
)
def test_a_table_of_any_weights(weights: list[float], few: int) -> None:
    given_weights = np.array(weights)
    given_weights[few:] = 0
    if not given_weights.sum():
        given_weights[ZERO] = 1.0
    row = frequencies(given_weights.copy())
    assert row.dtype == np.uint16
    assert int(row.sum()) == SLOTS
    assert row[ESCAPE] >= 1
    there = np.flatnonzero(row[:ESCAPE])
    assert len(there) == 0 or len(there) == there[-1] - there[0] + 1
    share = given_weights / given_weights.sum()
    assert set(np.flatnonzero(share[:ESCAPE] >= 1 / 8000)) <= set(there)
    if share[:ESCAPE].max() >= 1 / 8000:  # else there is no number at all, or only that of 0
        assert min(share[there[0]], share[there[-1]]) >= 1 / 8200


@pytest.mark.parametrize("spread", [0.0, 0.3, 5.0, 90.0])
def test_the_cheapest_table_of_each_column(spread: float) -> None:
    numbers = np.rint(np.random.default_rng(1).normal(0, spread, (33, 64))).clip(-ZERO).astype(np.int16)
    numbers[5, 7], numbers[6, 7] = (3000, 127) if spread > 1 else (0, 0)
    ids = cheapest(numbers)
    costs = shipped().costs.astype(np.float64)
    symbols = numbers.astype(np.int64) + ZERO
    inside = (symbols >= 0) & (symbols < ESCAPE)
    each = costs[:, np.where(inside, symbols, ESCAPE)]
    each = np.where(np.isfinite(each) & inside, each, costs[:, ESCAPE, None, None] + 16).sum(1)
    assert np.allclose(each[ids, np.arange(64)], each.min(0))


def test_nothing_costs_nothing() -> None:
    assert not cheapest(np.zeros((0, 64), np.int16)).any()
