"""The load test of the server: it tells another answer from the expected one, and an error from an answer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.serve.conftest import KEY, Served, built, ready, served, tiny

__all__ = ["built", "ready", "served", "tiny"]
SCRIPT = Path(__file__).resolve().parents[2] / "samples" / "serve_load.py"


@pytest.fixture
def load() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("samples_serve_load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_clients_are_measured_and_their_answers_compared(served: Served, load: ModuleType) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    asked = ["Who built the third mill?", "Who built the first mill?"]
    alone = load.measure((host, int(port), KEY), 1, [asked])
    expected = {one.question: one.text for one in alone.told}
    together = load.measure((host, int(port), KEY), 3, [asked, asked[::-1], [*asked, "zzyzx"]])
    assert len(together.told) == 6
    assert [error.startswith("RuntimeError: 404") for error in together.errors] == [True]
    cells = together.row(3, expected).split(" | ")
    assert cells[:4] == ["| 3", "7", "1", "0"]
    assert together.row(3, expected | {asked[0]: "another"}).split(" | ")[3] == "3"
    assert all(0 < one.first <= one.whole and one.tokens == 8 for one in together.told)
