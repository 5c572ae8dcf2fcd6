"""A server that is killed at any write of a learned passage loses none that is stored, and its next start works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvtool.core.cache import layout
from kvtool.core.cache.environment import Environment
from kvtool.core.cache.space import folder_bytes
from kvtool.core.cache.store import Store
from tests.cli.working import kvtool, tiny, write_corpus
from tests.faults.harness.children import in_child
from tests.faults.harness.flips import verified
from tests.faults.harness.subject import copy
from tests.faults.harness.works import learn, leftovers, make_old, start_learning

__all__ = ["tiny"]


def learn_until(folder: Path, budget: int, kill_at: int = 0) -> int:
    """Learn two passages; a kill comes before or after a write, or a step of a compaction. Returns how many there
    were."""
    met = 0

    def count() -> None:
        nonlocal met
        met += 1
        if met == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(real: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object) -> object:
            count()
            got = real(*args)
            count()
            return got

        return counted

    with (
        patch.object(Environment, "write", step(Environment.write)),
        patch.object(Environment, "copy_to", step(Environment.copy_to)),
        patch.object(layout, "point_to", step(layout.point_to)),
    ):
        learn(folder, 8, 10, budget)
    return met


def passages(folder: Path) -> list[str]:
    """The passages that are there; each has all of its records."""
    assert verified(folder / "store") == []
    with closing(Store.open(folder / "store")) as store:
        documents = {document.text: document.chunks[0].chunk_id for document in store.documents()}
        assert {*store.ids_here()} == {*store.chunk_ids()} >= {*documents.values()}
        return [*documents]


def done(work: Callable[[], Any]) -> Any:
    ended = in_child(work)
    assert not ended.trouble + ended.killed_by
    return ended.value


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_kill_at_any_write_loses_no_learned_passage(tiny: Path, tmp_path: Path) -> None:
    half, base, folder = tmp_path / "half", tmp_path / "base", tmp_path / "killed"
    corpus = write_corpus(tmp_path / "corpus", 1, 1)
    kvtool("ingest", corpus, "--store", half, "--model", tiny, "--lead-in", "prefix").fine()
    start_learning(half, base)
    start_learning(half, folder)
    done(lambda: learn(base, 0, 8))
    budget = 3 * folder_bytes(base / "store") // 4  # some are evicted, and the file is compacted

    def start() -> None:
        copy(base / "store", folder / "store")

    start()
    writes = done(lambda: learn_until(folder, budget))
    assert writes > 8
    before, end = done(lambda: passages(base)), done(lambda: passages(folder))
    assert 0 < len({*before} & {*end}) < len(before)
    for kill_at in range(1, writes + 1):
        start()
        assert in_child(lambda at=kill_at: learn_until(folder, budget, at)).killed_by == "SIGKILL"
        assert {*before} & {*end} <= {*done(lambda: passages(folder))}, kill_at
        make_old(folder)
        done(lambda: learn_until(folder, 10**9))
        assert {"Passage 8.", "Passage 9."} <= {*done(lambda: passages(folder))}, kill_at
        with closing(Store.open(folder / "store")) as store:
            assert len(store.chunk_ids()) == len(store.sources()), kill_at
        done(lambda: learn_until(folder, budget))
        assert folder_bytes(folder / "store") <= budget
        assert leftovers(folder) == []
