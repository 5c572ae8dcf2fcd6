"""Law 2: every mode that recomputes nothing is `reuse`, bit for bit."""

from __future__ import annotations

import pytest

from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from tests.fusion.making import BOS, CHUNKS, IDLE, PREFIX, Case, Fixed, Ids, new_case, same_bits, tokens, variants


def holds(case: Case, selector: Selector, lead_in: Ids = BOS, holes: tuple[int, ...] = ()) -> None:
    plan = case.plan(lead_in=lead_in, holes=holes)
    reused, other = case.fuse(plan, SELECTORS["reuse"]()), case.fuse(plan, selector)
    assert same_bits(reused, other)
    assert other.tokens == reused.tokens
    assert other.tokens.recomputed == 0
    assert other.tokens.reused == len(PREFIX) + sum(len(c) for i, c in enumerate(CHUNKS) if i not in holes)


@pytest.mark.parametrize("name", IDLE)
def test_recompute_nothing_is_reuse(case: Case, name: str) -> None:
    holds(case, IDLE[name])
    holds(case, IDLE[name], PREFIX, holes=(1,))


@pytest.mark.parametrize("name", IDLE)
def test_in_every_variant(name: str) -> None:
    for variant in variants(IDLE[name]):
        holds(new_case("llama"), variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_recomputed_row_is_caught(dtype: str) -> None:
    case = new_case("llama", dtype)
    with pytest.raises(AssertionError):
        holds(case, Epic(link_tokens=1))


def test_a_reused_question_is_caught() -> None:
    """The question's rows are computed after these chunks, not taken from where they were computed before."""
    case = new_case("llama")
    plan = case.plan(lead_in=BOS)
    fused = case.fuse(plan, SELECTORS["reuse"]())
    elsewhere = case.fuse(case.plan([tokens(len(c), 90 + i) for i, c in enumerate(CHUNKS)], lead_in=BOS), Epic(0))
    assert not same_bits(fused, elsewhere)
    start = plan.segments[-1].start
    for layer in range(1, len(fused.cache.buffers)):
        ours, other = fused.cache.buffers[layer].keys, elsewhere.cache.buffers[layer].keys
        assert not (ours[:, :, start:] == other[:, :, start:]).all()


def test_a_fixed_set_of_no_rows_is_reuse() -> None:
    case = new_case("qwen3")
    plan = case.plan(lead_in=BOS)
    nothing = Fixed(plan.mask())
    assert same_bits(case.fuse(plan, SELECTORS["reuse"]()), case.fuse(plan, nothing))
