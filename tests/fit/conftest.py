"""A store of a tiny model, and the same with a learned lead-in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.working import CHUNKS, kvtool, tiny, write_corpus

__all__ = ["documents", "learned", "plain", "taught", "tiny", "untaught"]

ROUNDS = ("--rounds", "4")


@pytest.fixture(scope="session")
def untaught(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untaught")
    write_corpus(folder / "in", 8)
    kvtool("ingest", folder / "in", "--store", folder / "s", "--model", tiny, "--quiet", *CHUNKS).fine()
    return folder


@pytest.fixture(scope="session")
def taught(untaught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learned, and not yet ingested with."""
    folder = tmp_path_factory.mktemp("taught") / "copy"
    shutil.copytree(untaught, folder)
    kvtool("fit", "lead-in", "--store", folder / "s", "--quiet", *ROUNDS).fine()
    return folder


@pytest.fixture
def documents(untaught: Path) -> Path:
    """What the stores were made of; a document is known by its path."""
    return untaught / "in"


@pytest.fixture
def plain(untaught: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untaught, tmp_path / "plain"))


@pytest.fixture
def learned(taught: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(taught, tmp_path / "learned"))
