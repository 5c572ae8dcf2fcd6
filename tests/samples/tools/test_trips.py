"""The trip of a question stays short: `samples/tools/trips.py` counts it."""

from __future__ import annotations

from pathlib import Path

from samples.tools import trips
from tests.cli.working import QUESTION, built, corpus, fresh, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]

MOST_FILES, MOST_ENTRIES = 20, 2


def test_a_question_passes_few_files_and_each_once_or_twice(store: Path) -> None:
    asked = ["query", QUESTION, "--store", str(store), "--max-tokens", "2", "--no-server"]
    tracer = trips.follow(trips.TRIPS["question"], asked)
    assert len(tracer.entries) <= MOST_FILES, " ".join(tracer.entries)
    steps = {here: list(callers) for here, callers in tracer.entries.items() if here not in trips.HELD}
    assert {here: callers for here, callers in steps.items() if len(callers) > MOST_ENTRIES} == {}
    assert {"query/prompt.py", "query/answer.py", "fusion/engine.py", "model/generate.py"} <= set(steps)
