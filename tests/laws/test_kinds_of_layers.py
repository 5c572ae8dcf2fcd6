"""Peculiarities of kinds of layers: a law catches each one when it is computed wrongly; prompts of many windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtool.core.common.machine import ATTENTION
from kvtool.core.fusion.selectors.epic import Epic
from tests.families import WINDOWED
from tests.fusion.making import BOS, LOSSLESS, Case, Ids, assert_full, case, new_case, plain_text, tokens
from tests.laws import mutants, test_1_recompute_everything, test_4_moved_chunk

Break = Callable[[pytest.MonkeyPatch], None]


def recomputed(case: Case) -> None:
    test_1_recompute_everything.holds(case, Epic(10_000), BOS)


def moved(case: Case) -> None:
    test_4_moved_chunk.holds(case, 137)


@pytest.mark.parametrize(
    ("name", "broken", "law"),
    [
        *((name, mutants.window_off_by_one, recomputed) for name in ("mistral-window", "gemma2", "gemma3", "exaone4")),
        ("gemma2", mutants.cap_dropped, recomputed),
        ("gpt-oss", mutants.sinks_dropped, recomputed),
        ("gpt-oss", mutants.sink_counted_as_a_key, recomputed),
        ("gemma3", mutants.wrong_rope_of_a_kind, moved),
        ("cohere2", mutants.wrong_rope_of_a_kind, moved),  # of a layer that has none
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_it_is_caught(name: str, broken: Break, law: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTENTION, "eager")  # a sink's share is made where weights are numbers
    one = new_case(name)
    law(one)
    broken(monkeypatch)
    one.kept.clear()
    with pytest.raises(AssertionError):
        law(one)


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
