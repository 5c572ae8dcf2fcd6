"""Law 3: one chunk after its own lead-in, the prompt's beginning: every mode = full prefill."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from tests.fusion.making import BOS, CHUNKS, IDLE, LOSSLESS, PREFIX, Case, assert_full, new_case, variants
from tests.laws import mutants


def settings(name: str) -> list[Selector]:
    """A selector at its defaults, at both ends, and in every variant."""
    kind = SELECTORS[name]
    chosen = [kind(), IDLE.get(name), LOSSLESS.get(name), *variants(kind())]
    return [selector for selector in chosen if selector is not None]


def holds(case: Case, selector: Selector) -> None:
    for chunk in CHUNKS[1:3]:
        plan = case.plan([chunk], lead_in=PREFIX)
        assert [segment.status for segment in plan.segments] == ["exact", "exact", "fresh"]
        fused = case.fuse(plan, selector)
        assert_full(case, plan.ids, fused.logits)
        assert fused.tokens.recomputed == (0 if selector.uses_cache else len(PREFIX) + len(chunk))


@pytest.mark.parametrize("name", SELECTORS)
def test_one_chunk_is_full_prefill(case: Case, name: str) -> None:
    for selector in settings(name) if case.name == "llama" else [SELECTORS[name]()]:
        if selector.uses_cache:
            holds(case, selector)
        else:
            assert_full(case, case.plan([CHUNKS[1]]).ids, case.fuse(case.plan([CHUNKS[1]]), selector).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in SELECTORS if SELECTORS[name].uses_cache])
@pytest.mark.parametrize("broken", [mutants.keys_rotated_twice, mutants.unrotation_off_by_one])
def test_broken_rotation_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[[pytest.MonkeyPatch], None], dtype: str
) -> None:
    case = new_case("llama", dtype)
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        holds(case, SELECTORS[name]())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["minicpm3", "deepseek-v2"])
def test_a_rotated_latent_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    case = new_case(name, dtype)
    holds(case, SELECTORS["reuse"]())
    mutants.latents_rotated(monkeypatch)
    with pytest.raises(AssertionError):
        holds(case, SELECTORS["reuse"]())


def test_behind_another_lead_in_it_is_not() -> None:
    case = new_case("llama")
    plan = case.plan([CHUNKS[1]], lead_in=BOS)
    assert plan.chunks[0].status == "hit"
    with pytest.raises(AssertionError):
        assert_full(case, plan.ids, case.fuse(plan, SELECTORS["reuse"]()).logits)
