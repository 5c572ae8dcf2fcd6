"""Small files that readers get wrong: what their text holds, and what it must not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus.reading import Bounds, Reading

_FOLDER = Path(__file__).parent / "cases"
_EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((_FOLDER / "expected.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    with Reading(bounds=Bounds(seconds=600)) as made:
        yield made


@pytest.mark.parametrize("name", _EXPECTED)
def test_the_text_of_a_file_is_read_whole(name: str, reading: Reading) -> None:
    path = _FOLDER / name
    text = "\n".join(document.text for document in reading.documents(path, path.read_bytes()))
    missing = [pattern for pattern in _EXPECTED[name]["matches"] if not re.search(pattern, text)]
    assert (missing, [part for part in _EXPECTED[name].get("without", ()) if part in text]) == ([], []), text


def test_every_file_has_an_expectation() -> None:
    assert {path.name for path in _FOLDER.iterdir()} == {*_EXPECTED, "expected.toml"}
