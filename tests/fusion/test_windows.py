"""Prompts and chunks that are longer than the windows of a model."""

from __future__ import annotations

import pytest

from kvtool.core.fusion.selectors.reuse import Reuse
from tests.families import WINDOWED, tiny_model
from tests.fusion.making import BOS, LOSSLESS, Case, Ids, assert_full, case, decoder_of, plain_text, tokens

# Prefix 9, then chunks of 40 and a question of 7: many windows of 12 to 32, and few of 96.
MANY: tuple[Ids, ...] = tuple(tokens(40, 70 + number) for number in range(8))


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("mode", ["full", "epic", "union", "blend"])
def test_prompts_of_many_windows(name: str, mode: str) -> None:
    """Recompute-all is full prefill, and 32 tokens of its answer are those of plain `transformers`."""
    one = case(name)
    plan = one.plan(MANY, lead_in=BOS)
    fused = one.fuse(plan, LOSSLESS[mode], reserve=32)
    assert_full(one, plan.ids, fused.logits)
    ids, logits = [], fused.logits
    for _ in range(32):
        ids.append(int(logits.argmax()))
        logits = one.decoder.extend(ids[-1:], fused.cache)[-1]
    wanted = plain_text(name, "float32", tuple(plan.ids), 32)
    assert tuple(ids[: len(wanted)]) == wanted


def test_positions_beyond_the_window_at_ingest() -> None:
    """A chunk longer than the window: its last rows see neither its first ones nor the lead-in."""
    one = case("gpt-oss")
    long = tokens(90, 3)
    plan = one.plan([long], lead_in=BOS)
    assert max(kind.window or 0 for kind in one.decoder.kinds) < len(long)
    again = Case("gpt-oss", "float32", decoder_of(tiny_model("gpt-oss"), "cpu"))
    exact = again.plan([long])
    assert exact.chunks[0].status == "exact"
    assert_full(again, exact.ids, again.fuse(exact, Reuse()).logits)
    assert plan.chunks[0].status == "hit"
