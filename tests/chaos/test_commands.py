"""Commands that write × kills, file size limits, full disks, flipped bits and cut files: a few of what `python -m
tests.chaos` injects for hours; and every write of a learned passage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import layout
from kvtool.core.cache.environment import Environment
from kvtool.core.cache.layout import folder_bytes
from kvtool.core.cache.store import Store
from tests.chaos import readers
from tests.chaos.children import in_child, kill_at
from tests.chaos.commands import WORKS, learn, start_learning
from tests.chaos.endings import ENDINGS
from tests.chaos.invariants import copy, leftovers, make_old, verified
from tests.cli.working import kvtool, write_corpus

ROOT = Path(__file__).resolve().parents[2]
FEW = "--flips 40 --cuts 10 --kills 3 --fills 1 --readers 0 --threads 1 --seed 3"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_every_command_survives_every_fault() -> None:
    command = [sys.executable, "-m", "tests.chaos", *FEW.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row[0], row[1]): int(row[2]) for row in (line.split(" | ") for line in done.stdout.splitlines()[2:])}
    assert rows["| one bit flipped", "all"] == 40
    assert rows["| file cut", "all"] == 10
    for ending in filter(lambda ending: ending.can_be(), ENDINGS):
        names = {name for fault, name in rows if fault == f"| {ending.title}"}
        assert names == {*(work.name for work in WORKS), "all"}


@pytest.mark.slow
def test_readers_during_writes_answer_as_an_idle_store(tiny: Path, tmp_path: Path) -> None:
    outcome = readers.run(tmp_path, str(tiny), processes=2, questions=15)
    assert outcome.wrong == []
    assert outcome.answers == 30
    assert outcome.commits > outcome.revisions > 1


# ---- every write of a learned passage ----


def learn_until(folder: Path, budget: int, number: int = 0) -> int:
    """Learn two passages; SIGKILL at a step of a write or of a compaction. Returns how many steps there were."""
    points = ((Environment, "write"), (Environment, "copy_to"), (layout, "point_to"))
    steps = kill_at(number, *points)
    learn(folder, 8, 10, budget)
    return steps[0]


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


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_kill_at_any_write_loses_no_learned_passage(tiny: Path, tmp_path: Path) -> None:
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
    for step in range(1, writes + 1):
        start()
        assert in_child(lambda step=step: learn_until(folder, budget, step)).killed_by == "SIGKILL"
        assert {*before} & {*end} <= {*done(lambda: passages(folder))}, step
        make_old(folder)
        done(lambda: learn_until(folder, 10**9))
        assert {"Passage 8.", "Passage 9."} <= {*done(lambda: passages(folder))}, step
        with closing(Store.open(folder / "store")) as store:
            assert len(store.chunk_ids()) == len(store.sources()), step
        done(lambda: learn_until(folder, budget))
        assert folder_bytes(folder / "store") <= budget
        assert leftovers(folder) == []
