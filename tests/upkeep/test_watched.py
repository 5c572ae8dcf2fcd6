"""A watcher counts a folder's bytes while commands write to it: they are never above the budget."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.cli.app import COMMANDS, load_command
from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import NoSpaceError
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.retrieval import tables
from tests.cli.working import QUESTION, SHORT, damages, kvtool, listing, write_corpus
from tests.compress.making import run
from tests.upkeep.watching import Watcher, bytes_in


def test_ingest(fresh: Any, tmp_path: Path) -> None:
    path, folder = tmp_path / "fresh", tmp_path / "in"
    write_corpus(folder, 2)
    fresh(folder).fine()
    budget = 2 * bytes_in(path)
    write_corpus(folder, 12)
    with Watcher(path) as watcher:
        fresh(folder, "--max-size", str(budget)).failed(14, "over its budget", "kvtool store prune")
    assert 0.7 * budget < watcher.most <= budget
    there = len(listing(path))
    assert 2 < there < 12
    kvtool("store", "prune", "--budget", str(budget), "--store", path).fine()
    with Watcher(path) as watcher:
        fresh(folder).failed(14, "the budget with `kvtool store prune --budget SIZE`")
        kvtool("query", QUESTION, "--store", path, *SHORT).fine()
    assert watcher.most <= budget
    assert len(listing(path)) >= there  # what was committed stays
    assert damages(path) == []
    done = fresh(folder, "--max-size", str(10**9)).fine()  # a flag wins for its command, and it is said
    assert "takes the place of the store's own budget" in done.err
    assert len(listing(path)) == 12


def test_compress(plain: Path) -> None:
    budget = int(1.1 * bytes_in(plain))
    with Watcher(plain) as watcher, pytest.raises(NoSpaceError):
        compress(plain, CompressOptions(levels=("lossless", "1", "2"), questions=0, max_size=budget))
    assert watcher.most <= budget
    assert damages(plain) == []


def test_pull(plain: Path, tmp_path: Path) -> None:
    blobs = open_blobs((tmp_path / "tier").as_uri(), 10.0)
    with Store.open(plain) as store:
        push(store, blobs)
    target, budget = tmp_path / "here", int(0.75 * bytes_in(plain))
    with Store.create_or_open(target):
        pass
    with Watcher(target) as watcher, pytest.raises(NoSpaceError):
        pull(target, blobs, max_size=budget)
    assert watcher.most <= budget
    kvtool("store", "prune", "--budget", str(3 * budget), "--store", target).fine()
    pull(target, blobs)
    assert damages(target) == []
    assert len(listing(target)) == len(listing(plain))
    blobs.close()


def test_the_index_leaves_the_reserve_of_the_disk_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered all the same: the index is made again for each."""
    monkeypatch.setattr(space, "_SMALL_FILE", 0)
    shutil.rmtree(store / "index")
    (store / "index").mkdir()
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    with pytest.raises(OSError, match="No space left"):
        tables.write_tables(store / "index" / "large.safetensors", {}, {"text": "x"})
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()
    assert not [path for path in (store / "index").rglob("*") if path.is_file()]


_NAMED = re.compile(r"`kvtool ((?:[a-z]+[a-z-]* ?)+)")


def test_every_command_that_a_message_names_exists() -> None:
    known: set[tuple[str, ...]] = set()
    for name in COMMANDS:
        command = load_command(name)
        known.add((name,))
        known |= {(name, inner) for inner in getattr(command, "commands", {})}
    groups = {words[0] for words in known if len(words) == 2}
    named = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for found in _NAMED.finditer(path.read_text(encoding="utf-8")):
            words = found[1].split()
            named.add(tuple(words[: 2 if words[0] in groups and len(words) > 1 else 1]))
    assert ("store", "prune") in named
    assert named <= known, sorted(named - known)


def test_the_file_shrinks_when_exact_records_are_dropped(fitted: Path) -> None:
    before = bytes_in(fitted)
    report = run(fitted, "2", keep_raw=False)
    assert report.dropped
    assert report.to_json()["bytes_freed"] > 0
    assert bytes_in(fitted) < before - report.freed // 2
    assert damages(fitted) == []
