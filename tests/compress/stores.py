"""Stores of a tiny model as fixtures: raw, and with a profile and all levels. They need the fixture `tiny`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.compress.making import make_fitted, make_plain


@pytest.fixture(scope="session")
def plain_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leave it as it is."""
    return make_plain(tiny, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def fitted_store(plain_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leave it as it is."""
    return make_fitted(plain_store, tmp_path_factory.mktemp("fitted"))


@pytest.fixture
def plain(plain_store: Path, tmp_path: Path) -> Path:
    """A store of one's own, raw."""
    return Path(shutil.copytree(plain_store, tmp_path / "plain"))


@pytest.fixture
def fitted(fitted_store: Path, tmp_path: Path) -> Path:
    """A store of one's own with a profile and all levels."""
    return Path(shutil.copytree(fitted_store, tmp_path / "fitted"))
