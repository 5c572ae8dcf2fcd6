"""Pushes and pulls that are killed with -9 at a known moment, over a folder, a Redis and a bucket.

At random moments, and over a folder, the fault harness does it (`tests/support/faults.py`): what is left of files that
were being written is looked at there. Buckets of others are written by the same class as those of S3."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.errors import StoreNotFoundError
from kvtool.core.remote import blobs as blobs_module
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.remote.dying import Moment, pulling, pushing
from tests.remote.test_sharing import add, forget, is_whole, sources_of, store
from tests.remote.test_transfer import bytes_of

__all__ = ["store"]
pytestmark = pytest.mark.usefixtures("small_packs")


@pytest.fixture(scope="module")
def processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.remote.dying", "obstore", "redis"])
    return context


def killed(processes: Any, target: Callable[..., None], *given: object) -> None:
    child = processes.Process(target=target, args=(*given, dict(os.environ)))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "moment",
    [("put", 1, True), ("compare_and_swap", 1, False), ("compare_and_swap", 1, True), ("delete", 1, True)],
    ids=["some sent", "before the head", "after the head", "some deleted"],
)
def test_a_push(
    processes: Any,
    moment: Moment,
    store: Store,
    blobs: Blobs,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push(store, blobs)
    forget(store, "f2")
    add(store, "f3", "f3.0", "f3.1")
    killed(processes, pushing, store.path, url, moment)
    before, after = ["f0", "f1", "f2"], ["f0", "f1", "f3"]
    assert is_whole(blobs)
    assert pull(tmp_path / "then", blobs).damaged == []
    with Store.open(tmp_path / "then") as then:
        assert then.sources() == (after if moment in (("compare_and_swap", 1, True), ("delete", 1, True)) else before)
        assert verify(then) == []
    monkeypatch.setitem(blobs_module.LEASES, "sweep", 0.4)  # the dead one's is waited for
    push(store, blobs, PushOptions(delete=True))
    assert is_whole(blobs)
    assert pull(tmp_path / "pulled", blobs).damaged == []
    assert sources_of(tmp_path / "pulled") == after
    assert bytes_of(tmp_path / "pulled") == bytes_of(store.path)


def test_a_first_push(processes: Any, store: Store, blobs: Blobs, url: str) -> None:
    killed(processes, pushing, store.path, url, ("compare_and_swap", 1, False))
    with pytest.raises(StoreNotFoundError):
        read_catalogue(blobs)
    assert push(store, blobs).chunks.transferred == 0  # they are there already
    assert len(read_catalogue(blobs).files) == 3
    assert is_whole(blobs)


@pytest.mark.some(3)
@pytest.mark.parametrize("moment", [("set_manifest", 1, True), ("put_chunk", 3, True), ("commit_files", 1, True)])
def test_a_pull(processes: Any, moment: Moment, store: Store, blobs: Blobs, url: str, tmp_path: Path) -> None:
    push(store, blobs)
    everything = pull(tmp_path / "whole", blobs).bytes
    killed(processes, pulling, tmp_path / "pulled", url, moment)
    with Store.open(tmp_path / "pulled") as pulled:
        assert verify(pulled) == []
        assert {*pulled.sources()} <= {*store.sources()}
    report = pull(tmp_path / "pulled", blobs)
    assert report.damaged == []
    assert report.bytes < everything
    assert sources_of(tmp_path / "pulled") == store.sources()
    assert bytes_of(tmp_path / "pulled") == bytes_of(store.path)
