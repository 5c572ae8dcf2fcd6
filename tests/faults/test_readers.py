"""Reader processes during an ingest, a prune and a compact (`tests/support/readers.py` runs it for longer)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.working import CHUNKS, PREFIX, kvtool
from tests.support import readers


@pytest.mark.slow
def test_every_answer_is_that_of_an_idle_store_at_its_revision(tiny: Path, tmp_path: Path) -> None:
    readers.write_corpus(tmp_path / "corpus")
    store = tmp_path / "store"
    kvtool("ingest", tmp_path / "corpus", "--store", store, "--model", tiny, *CHUNKS, *PREFIX).fine()
    kvtool("query", "mill", "--store", store, "--max-tokens", "1").fine()  # the gate has run
    outcome = readers.run(store, tmp_path / "corpus", tmp_path, processes=2, questions=15)
    assert outcome.failures == outcome.differences == []
    assert outcome.answers == 30
    assert outcome.revisions > 1
    assert outcome.commits > outcome.revisions
