"""Ray's workers compute what one process computes, a killed one included; a run that ends early leaves whole files."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.ingest import ray_crew, ray_storer
from kvtool.core.ingest.far_maker import Computed, FarMaker, Recipe
from kvtool.core.ingest.ray_crew import RayCrew, check_there, share_of
from kvtool.core.ingest.storer import Batch
from kvtool.core.model.options import ModelOptions
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.identity import store_identity
from tests.cli.working import CHUNKS, PREFIX, damages, kvtool, listing, state, write_corpus
from tests.cli.working import tiny as tiny

WORKERS = ("--ray", "local", "--ray-workers", "2")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 64})


def _killing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill the first worker when the first batch is there; lists who was killed."""
    killed: list[int] = []
    plain = RayCrew.next

    def take(self: RayCrew) -> Any:
        if not killed:
            killed.append(self.facts.pid)
            os.kill(self.facts.pid, signal.SIGKILL)
        return plain(self)

    monkeypatch.setattr(RayCrew, "next", take)
    return killed


class _Backwards:
    """A crew in this process, of which the last batch comes first; it is stopped behind so many."""

    size = 2

    def __init__(self, recipe: Recipe, most: int) -> None:
        self._maker, self._most, self._under_way = FarMaker(recipe), most, list[Batch]()
        self.facts, self.is_closed = self._maker.facts(), False

    @property
    def is_full(self) -> bool:
        return len(self._under_way) == 3

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def prefix(self, prefix: WantedChunk) -> Computed:
        return self._maker.prefix(prefix)

    def submit(self, batch: Batch) -> None:
        self._under_way.append(batch)

    def next(self) -> tuple[Batch, Computed]:
        if not self._most:
            raise KeyboardInterrupt
        self._most -= 1
        batch = self._under_way.pop()
        return batch, self._maker.chunks(batch.chunks)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def alone(tiny: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command of an ingest, whose store `alone` one process has made."""
    here = ("ingest", write_corpus(tmp_path / "corpus"), "--model", tiny, *CHUNKS, *PREFIX, "--json", "--store")
    kvtool(*here, tmp_path / "alone").fine()
    return here


@pytest.mark.usefixtures("small_batches")
def test_workers_make_what_one_process_makes(
    alone: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = _killing(monkeypatch)
    done = kvtool(*alone, tmp_path / "far", *WORKERS).fine().json
    assert len(killed) == 1
    assert ["is replaced" in text for text in done["warnings"]] == [True]
    assert done["resolved"]["workers"] == 2
    assert state(tmp_path / "far") == state(tmp_path / "alone")


@pytest.mark.usefixtures("small_batches")
def test_what_ends_in_the_middle_is_resumed(
    alone: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crews: list[_Backwards] = []

    def crew(most: int, recipe: Recipe) -> _Backwards:
        crews.append(_Backwards(recipe, most))
        return crews[-1]

    monkeypatch.setattr(ray_storer, "RayCrew", lambda address, workers, recipe, warn: crew(14, recipe))
    kvtool(*alone, tmp_path / "far", *WORKERS).failed(130)
    assert damages(tmp_path / "far") == []
    there = len(listing(tmp_path / "far"))
    assert 0 < there < 6
    monkeypatch.setattr(ray_storer, "RayCrew", lambda address, workers, recipe, warn: crew(99, recipe))
    done = kvtool(*alone, tmp_path / "far", *WORKERS).fine().json
    assert done["documents"]["unchanged"] == there
    assert [crew.is_closed for crew in crews] == [True, True]
    assert state(tmp_path / "far") == state(tmp_path / "alone")


def test_a_worker_says_what_is_wrong_with_its_model(alone: tuple[object, ...], tmp_path: Path) -> None:
    """As its first answer: an actor that fails while it is made has only died, for Ray."""
    with Store.open(tmp_path / "alone") as store:
        identity = store_identity(store)
    other = replace(identity, fingerprint="0" * 64)
    worker = FarMaker(Recipe(other, ModelOptions(model=identity.model), "raw", "raw"))
    with pytest.raises(ModelError, match="another model"):
        worker.facts()
    gone = FarMaker(Recipe(identity, ModelOptions(model=str(tmp_path / "gone")), "raw", "raw"))
    with pytest.raises(ModelError):
        gone.facts()


def test_what_a_cluster_has_not_is_refused() -> None:
    assert [share_of({"CPU": 32}, 0, "auto").actors, share_of({"CPU": 2}, 0, "auto").actors] == [4, 1]
    shared = share_of({"CPU": 64, "GPU": 4}, 0, "auto")
    assert (shared.actors, shared.gpus) == (4, 1)
    with pytest.raises(UsageError, match="3 workers, and Ray has 2 GPUs"):
        share_of({"CPU": 64, "GPU": 2}, 3, "cuda")
    with pytest.raises(UsageError, match="3 workers, and Ray has 2 CPUs"):
        share_of({"CPU": 2, "GPU": 2}, 3, "cpu")


def test_an_address_without_a_cluster_leaves_no_store(tiny: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1)
    args = ("ingest", corpus, "--model", tiny, "--store", tmp_path / "store", "--ray", "127.0.0.1:1")
    kvtool(*args).failed(1, "Ray does not answer at '127.0.0.1:1'", "--ray local")
    assert not (tmp_path / "store").exists()
    with pytest.raises(KvtoolError, match="does not answer"):
        check_there("nonsense:xx")


def test_without_ray_the_line_that_installs_it_is_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(KvtoolError, match="needs the package ray") as told:
        ray_crew.check_there("local")
    assert told.value.hint == "pip install 'kvtool[ray]'"
