"""The trip of a question stays short: `samples/trips.py` counts it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.working import QUESTION, built, corpus, fresh, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]

SCRIPT = Path(__file__).parents[2] / "samples" / "trips.py"
# One of them says what cannot be found before the model is loaded, one which rows of a chunk are stored, one which
# records a row can see.
MOST_FILES, MOST_ENTRIES = 28, 2


@pytest.fixture
def trips() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("samples_trips", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_question_passes_few_files_and_each_once_or_twice(store: Path, trips: ModuleType) -> None:
    asked = ["query", QUESTION, "--store", str(store), "--max-tokens", "2", "--no-server"]
    tracer = trips.follow(trips.TRIPS["question"], asked)
    assert len(tracer.entries) <= MOST_FILES, list(tracer.entries)
    steps = {here: list(callers) for here, callers in tracer.entries.items() if here not in trips.HELD}
    assert {here: callers for here, callers in steps.items() if len(callers) > MOST_ENTRIES} == {}
    assert {"query/layout.py", "query/answer.py", "fusion/engine.py", "model/generate.py"} <= set(steps)
