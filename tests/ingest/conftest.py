"""A folder of three files."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    for name in ("one", "two", "three"):
        (made / f"{name}.txt").write_text(f"The {name} mill stands on the river.")
    return made
