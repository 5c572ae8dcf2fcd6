"""Peculiarities of kinds of layers: a law catches each one when it is computed wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtool.core.common.switches import ATTENTION
from kvtool.core.fusion.selectors.epic import Epic
from tests.fusion.making import BOS, Case, new_case
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
