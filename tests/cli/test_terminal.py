"""The chat in a real terminal, over a tiny model: what needs no good answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.working import CHUNKS, kvtool, write_corpus
from tests.families import save_tiny
from tests.support.terminal import played

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")


@pytest.mark.slow
def test_keys_and_windows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 2)
    (corpus / "kellhaven.md").write_text("The observatory at Kellhaven was founded by a baker.\n")
    model = save_tiny("llama", tmp_path / "model")
    kvtool("ingest", corpus, "--model", model, "--store", tmp_path / "store", *CHUNKS).fine()
    for scene in ("korean", "narrow", "several-lines", "ends"):
        assert "Enter asks" in played(scene, tmp_path / "store", tmp_path, "--max-tokens", "8")
