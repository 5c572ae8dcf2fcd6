"""Law 1: recompute everything = full prefill by unmodified `transformers`: same logits, same greedy text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.model.generate import Sampling, first_token, generate
from tests.fusion.making import BOS, LOSSLESS, PREFIX, Case, Ids, assert_full, new_case, plain_text, variants
from tests.fusion.making import case as shared_case
from tests.laws import mutants

TOKENS, MORE = 12, 32  # of the answer; more of it in the default mode


def length(name: str) -> int:
    """Return the number of tokens of an answer after a mode that are held against those of `transformers`."""
    return MORE if name == "union" else TOKENS


def holds(case: Case, selector: Selector, lead_in: Ids = BOS, tokens: int = TOKENS) -> None:
    plan = case.plan(lead_in=lead_in)
    fused = case.fuse(plan, selector, reserve=tokens)
    assert_full(case, plan.ids, fused.logits)
    if case.dtype == "float32":
        sampling = Sampling.greedy(tokens)
        first = first_token(fused.logits, sampling)
        said = generate(case.decoder, fused.cache, first, sampling).ids
        assert said == plain_text(case.name, case.dtype, tuple(plan.ids), tokens)


@pytest.mark.every_family
@pytest.mark.parametrize("name", LOSSLESS)
def test_recompute_everything_is_full_prefill(case: Case, name: str) -> None:
    """Stored KV is wrong for this prompt in every chunk; after the prompt's own beginning the first would be right."""
    holds(case, LOSSLESS[name], tokens=length(name))


def test_behind_the_prompts_own_beginning(case: Case) -> None:
    holds(case, LOSSLESS["union"], PREFIX)


@pytest.mark.parametrize("name", LOSSLESS)
def test_in_every_variant(name: str) -> None:
    for variant in variants(LOSSLESS[name]):
        holds(shared_case("qwen3"), variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in LOSSLESS if SELECTORS[name].uses_cache])
@pytest.mark.parametrize("broken", [mutants.rows_see_the_future, mutants.positions_off_by_one])
def test_broken_engine_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[[pytest.MonkeyPatch], None], dtype: str
) -> None:
    case = new_case("llama", dtype)
    holds(case, LOSSLESS[name])
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        holds(case, LOSSLESS[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reuse_is_not_full_prefill(dtype: str) -> None:
    """The tiny models distinguish fused and full prompts, so the law above says something."""
    with pytest.raises(AssertionError):
        holds(new_case("llama", dtype), SELECTORS["reuse"]())
