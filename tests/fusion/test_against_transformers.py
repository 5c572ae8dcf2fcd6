"""Fused logits against unmodified `transformers`, which gets positions and a mask. Reused rows are prefilled at their
final positions, so that nothing is moved; recomputed rows and the question are computed over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from tests.fusion.making import BOS, NAMES, PREFIX, Case, Ids, case, new_case, plain_model
from tests.laws import mutants

LINKS = (0, 1, 16, 1000)
ALLOWED = 1e-4


def _mask(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]


def masks_of(model: Any, rows: torch.Tensor, keys: torch.Tensor) -> Any:
    before, window = keys <= rows[:, None], getattr(model.config, "sliding_window", None)
    near = before & (keys > rows[:, None] - window) if window else before
    if getattr(model.config, "layer_types", None):
        return {"full_attention": _mask(before), "sliding_attention": _mask(near)}
    return _mask(near)


def forward(model: Any, ids: Sequence[int], positions: Sequence[int], past: DynamicCache, seen: Sequence[int]) -> Any:
    """Compute rows at `positions` over a cache whose rows have the positions `seen`, in any order."""
    rows = torch.tensor(positions)
    mask = masks_of(model, rows, torch.tensor([*seen, *positions]))
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor([list(ids)]), position_ids=rows[None], attention_mask=mask, past_key_values=past
        )


def reused(model: Any, plan: Plan, lead_in: Ids) -> DynamicCache:
    """Prefill all of the context, each segment after its lead-in, whose rows are dropped."""
    whole = DynamicCache()
    for segment in plan.segments[:-1]:
        before = lead_in if segment.start else ()
        alone = DynamicCache()
        forward(model, [*before, *segment.ids], range(segment.start - len(before), segment.stop), alone, [])
        for index, layer in enumerate(alone.layers):
            whole.update(layer.keys[:, :, len(before) :], layer.values[:, :, len(before) :], index)
    return whole


def independent(name: str, plan: Plan, lead_in: Ids, links: int) -> torch.Tensor:
    """Logits of the last question token, the first `links` tokens of every chunk that is not exact recomputed."""
    model, question = plain_model(name, "float32"), plan.segments[-1]
    linked = [row for s in plan.chunks if s.status == "hit" for row in range(s.start, min(s.start + links, s.stop))]
    kept = [row for row in range(question.start) if row not in set(linked)]
    past = DynamicCache()
    for index, layer in enumerate(reused(model, plan, lead_in).layers):
        past.update(layer.keys[:, :, kept], layer.values[:, :, kept], index)
    rows = [*linked, *range(question.start, question.stop)]
    logits: torch.Tensor = forward(model, [plan.ids[row] for row in rows], rows, past, kept).logits[0, -1]
    return logits


def holds(shared: Case, lead_in: Ids, links: int) -> None:
    plan = shared.plan(lead_in=lead_in)
    expected = independent(shared.name, plan, lead_in, links)
    for selector in [Epic(link_tokens=links, shift=False)] + [Reuse()] * (not links):
        assert float((shared.fuse(plan, selector).logits - expected).abs().max()) <= ALLOWED


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("lead_in", [BOS, PREFIX], ids=["other", "prefix"])
@pytest.mark.parametrize("name", NAMES)
def test_reuse_and_epic(name: str, lead_in: Ids, links: int) -> None:
    holds(case(name), lead_in, links)


@pytest.mark.parametrize(
    "broken",
    [
        mutants.rotation_of_wrong_sign,
        mutants.unrotation_off_by_one,
        mutants.keys_rotated_twice,
        mutants.chunks_see_their_own_future,
    ],
)
def test_what_is_broken_is_caught(monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        holds(new_case("llama"), BOS, 16)
