"""A tiny model's folder, and a copy of it that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.families import save_tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))
