"""The memory of a pass, without the prompt's cache: it grows with its rows, not with rows × prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvtool.core.common.machine import ATTENTION
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.kernels.attention.dispatch import explain
from kvtool.core.kernels.attention.params import AttentionCall
from tests.fusion.making import BOS, QUESTION, Case, case, tokens

CHUNKS = 3
SHORT, LONG = 100, 600  # tokens of a chunk
MORE = CHUNKS * (LONG - SHORT)
HEADS, GROUP = 4, 2
# Of every prompt token: whether it is cached, wanted, a hole; its id. The question's pass also has float32 sums.
TOKEN_BYTES = 16
SUMS = 5


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTENTION, raising=False)
    if explain(AttentionCall("cpu", torch.float32)).serves.name != "flash":
        pytest.skip("torch's kernels, which this CPU takes, have memory of their own")


def most_held(run: Callable[[], object]) -> int:
    """Bytes of tensors that this thread held at once, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    assert watched.profiler is not None
    events = watched.profiler.kineto_results.events()
    held = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda one: one.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def beside_the_cache(one: Case, size: int, selector: Selector) -> int:
    plan = one.plan([tokens(size, seed) for seed in range(CHUNKS)], lead_in=BOS)
    one.fuse(plan, selector)  # machine code and tables are made at the first call
    return most_held(lambda: one.fuse(plan, selector)) - one.decoder.kv_bytes(plan.length)


def growth(selector: Selector) -> int:
    return beside_the_cache(case("llama"), LONG, selector) - beside_the_cache(case("llama"), SHORT, selector)


def test_a_longer_prompt_takes_no_more_but_its_cache() -> None:
    assert (len(QUESTION) + CHUNKS * 8) * HEADS > TOKEN_BYTES  # a matrix of scores, be it of bytes, would be noticed
    assert growth(Epic(8, shift=False)) <= TOKEN_BYTES * MORE


def test_a_shift_takes_a_table_of_positions_more() -> None:
    """cos, sin, and while they are made what they are made of, float32 each; no layer's keys and values."""
    table = 5 * 4 * case("llama").decoder.shapes[0].key_dim
    assert growth(Epic(8)) <= (TOKEN_BYTES + table) * MORE


def test_the_questions_own_pass_holds_few_rows_of_weights() -> None:
    """Rows of weights, one head's at a time: at most 64, here those of the question."""
    weights = 4 * (2 * GROUP + 2) * len(QUESTION)  # float32: scores and weights of the heads of one key's, their sums
    assert growth(Union(ratio=0.0001)) <= (TOKEN_BYTES + 4 * SUMS + weights) * MORE
