"""The shared fixtures of the command tests, and a folder of three files."""

from pathlib import Path

import pytest

from tests.cli.working import built, corpus, fresh, store, tiny

__all__ = ["built", "corpus", "fresh", "store", "tiny"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    for name in ("one", "two", "three"):
        (made / f"{name}.txt").write_text(f"The {name} mill stands on the river.")
    return made
