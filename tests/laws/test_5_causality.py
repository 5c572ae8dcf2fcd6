"""Law 5: a scattered row's output does not change, by a single bit, when any later token changes.

A mixture of experts multiplies rows expert by expert: another token in the pass is another shape of these products,
and their sums are rounded otherwise. There the law is tested within rounding (measured: 1e-6 in float32, 0.03 in
bfloat16, of values of about 1; in bfloat16 a rounded router score may choose another expert altogether).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from tests.fusion.making import BOS, CHUNKS, MOE, QUESTION, Case, Fixed, Ids, new_case, rms, tokens
from tests.laws import mutants

OTHER_QUESTION = tokens(len(QUESTION), 60)
OTHER_CHUNK = tokens(len(CHUNKS[-1]), 61)


def holds(case: Case, chunks: Sequence[Ids], others: Sequence[Ids], selector: Selector, question: Ids) -> None:
    """Rows before the first changed token are the same in both prompts, in every layer."""
    a, b = case.plan(chunks, lead_in=BOS), case.plan(others, lead_in=BOS, question=question)
    start = next(at for at, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y)
    first, second = case.fuse(a, selector), case.fuse(b, selector)
    assert torch.equal(first.recomputed[:start], second.recomputed[:start])
    assert_same_rows(case, first, second, start)
    assert not torch.equal(first.logits, second.logits)


def assert_same_rows(case: Case, a: Fused, b: Fused, stop: int) -> None:
    for one, other in zip(a.cache.buffers, b.cache.buffers, strict=True):
        for x, y in ((one.keys, other.keys), (one.values, other.values)):
            x, y = x[:, :, :stop], y[:, :, :stop]
            if case.name in MOE and stop:
                assert rms(x.float() - y.float()) <= (1e-5 if case.dtype == "float32" else 0.1) * rms(x)
            else:
                assert torch.equal(x, y)


@pytest.mark.some(24)
@pytest.mark.parametrize("name", SELECTORS)
def test_another_question_changes_no_context_row(case: Case, name: str) -> None:
    """Also where rows are chosen on the way; a mode that looks at the question is held to its chosen rows."""
    selector = SELECTORS[name]()
    one, other = case.plan(lead_in=BOS), case.plan(lead_in=BOS, question=OTHER_QUESTION)
    first, second = (case.fuse(plan, selector).recomputed for plan in (one, other))
    held = selector if torch.equal(first, second) else Fixed(first)
    holds(case, CHUNKS, CHUNKS, held, OTHER_QUESTION)


@pytest.mark.some(24)
@pytest.mark.parametrize("name", SELECTORS)
def test_another_last_chunk_changes_no_earlier_row(case: Case, name: str) -> None:
    """The rows that a mode recomputes at its last layer, fixed: which ones they are may depend on all chunks."""
    selector = SELECTORS[name]()
    plan = case.plan(lead_in=BOS)
    by_content = selector.narrowing(plan, 4) or selector.ranking_layers(plan, 4) or not selector.uses_cache
    held = Fixed(case.fuse(plan, selector).recomputed) if by_content else selector
    holds(case, CHUNKS, [*CHUNKS[:-1], OTHER_CHUNK], held, QUESTION)


def test_another_last_token_changes_no_logits_before_it(case: Case) -> None:
    decoder, plan = case.decoder, case.plan(lead_in=BOS)
    seen = []
    for last in (10, 11):
        fused = case.fuse(plan, SELECTORS["reuse"]())
        seen.append(decoder.extend([7, 8, 9, last], fused.cache))
    if case.name not in MOE:
        assert torch.equal(seen[0][:3], seen[1][:3])
    assert not torch.equal(seen[0][3], seen[1][3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["epic", "blend"])
def test_a_mask_that_shows_the_future_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    case = new_case("llama", dtype)
    mutants.rows_see_the_future(monkeypatch)
    with pytest.raises(AssertionError):
        holds(case, CHUNKS, CHUNKS, SELECTORS[name](), OTHER_QUESTION)
