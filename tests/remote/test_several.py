"""Several at one tier, on every backend that can be written: pushes, deletions, pushes that died, lists that lag."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.remote import blobs as blobs_module
from kvtool.core.remote import object_store
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.folder import FolderBlobs
from kvtool.core.remote.object_store import ObjectBlobs
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.remote.redis import RedisBlobs
from tests.remote.backends import WRITABLE
from tests.remote.test_sharing import after_first, is_whole, other, pushed_by, store
from tests.stores import add, forget, new_store, sources_of

__all__ = ["other", "store"]
pytestmark = [pytest.mark.usefixtures("small_packs"), pytest.mark.parametrize("url", WRITABLE, indirect=True)]


def test_push_during_a_sweep(
    store: Store, other: Store, blobs: Blobs, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweep between sending and publishing: f1 and f2 are there, and by the other's catalogue nobody needs them."""
    push(store, blobs)
    pushed_by(other, url)()
    add(store, "f3", "f3.0")
    after_first(monkeypatch, blobs, "put", pushed_by(other, url, delete=True, yes=True))
    push(store, blobs)
    assert is_whole(blobs)
    assert len(read_catalogue(blobs).files) == 5


def test_a_sweep_follows_the_catalogue_in_force(
    store: Store, other: Store, blobs: Blobs, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bring a document back between publishing and sweeping, by the other one."""
    push(other, blobs)
    push(store, blobs)
    after_first(monkeypatch, blobs, "compare_and_swap", pushed_by(other, url))
    push(store, blobs, PushOptions(delete=True, yes=True))
    assert is_whole(blobs)
    assert pull(tmp_path / "pulled", blobs).damaged == []
    with Store.open(tmp_path / "pulled") as pulled:
        assert {entry.source for entry in pulled.documents()} == {"f0", "f1", "f2", "g"}


def test_values_of_a_restored_version_are_kept(
    store: Store, other: Store, blobs: Blobs, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Push a version anew that only the oldest catalogue counts on, by one that begins later and ends sooner."""
    for number in range(3):
        add(store, "f1", f"version {number}")
        push(store, blobs)
    add(other, "f1", "version 0")
    with Store.open(new_store(tmp_path / "third", files=0)) as third:
        add(third, "h", "h.0")

        def meanwhile() -> None:
            blobs.hold("push-another")  # so nothing is reclaimed by this one
            pushed_by(other, url)()
            blobs.release("push-another")

        after_first(monkeypatch, blobs, "get", meanwhile)
        push(third, blobs)
    assert len(read_catalogue(blobs).files) == 5
    assert is_whole(blobs)


@pytest.mark.some(1)
def test_push_waits_for_a_sweep(store: Store, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blobs_module.LEASES, "sweep", 0.4)
    started = time.monotonic()
    blobs.hold("sweep-dead")
    push(store, blobs)
    assert time.monotonic() - started > 0.3  # it is waited for; forever, and this test would not end
    assert blobs.held() <= ({"sweep-dead"} if isinstance(blobs, ObjectBlobs) else set())  # until a later lease


@pytest.mark.some(1)
def test_killed_push_delays_sweeps(store: Store, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    push(store, blobs)
    forget(store, "f2")
    blobs.hold("push-killed")
    report = push(store, blobs, PushOptions(delete=True))
    assert (report.removed, report.removals_deferred) == (0, 7)
    assert len(read_catalogue(blobs).files) == 2
    monkeypatch.setitem(blobs_module.LEASES, "push", 0.2)
    blobs.hold("push-killed")
    while "push-killed" in blobs.held():  # by the store's own clock, which may count whole seconds
        time.sleep(0.1)
        blobs.hold("push-own")
    blobs.release("push-own")
    assert push(store, blobs, PushOptions(delete=True)).removed == 7


def test_pull_during_a_deletion(
    store: Store, blobs: Blobs, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    push(store, blobs)
    forget(store, "f2")
    after_first(monkeypatch, blobs, "fetch", pushed_by(store, url, delete=True, yes=True))
    report = pull(tmp_path / "pulled", blobs)
    assert report.damaged == []
    assert (report.files.transferred, report.files.unchanged) == (2, 0)
    assert sources_of(tmp_path / "pulled") == ["f0", "f1"]


def hold_at(blobs: Blobs, name: str, at: float) -> None:
    if isinstance(blobs, FolderBlobs):
        blobs.hold(name)
        os.utime(f"{blobs.url.removeprefix('file://')}/push/{name}", (at, at))
    elif isinstance(blobs, RedisBlobs):
        blobs._client.zadd(blobs._key("push"), {name: at})
    else:  # at a time that the service sets
        blobs.hold(name)


@pytest.mark.parametrize("what", ["push", "sweep"])
def test_lease_of_a_wrong_clock_is_ignored(what: str, store: Store, blobs: Blobs) -> None:
    if isinstance(blobs, ObjectBlobs):
        pytest.skip("the service itself sets the time of an object")
    push(store, blobs)
    forget(store, "f2")
    hold_at(blobs, f"{what}-ghost", time.time() + 10_000_000)
    blobs.hold("push-running")
    assert blobs.held() == {"push-running"}
    blobs.release("push-running")
    report = push(store, blobs, PushOptions(delete=True))
    assert (report.removed, report.removals_deferred) == (7, 0)


def test_wait_for_an_endless_sweep(store: Store, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blobs_module.LEASES, "sweep", 0.2)
    monkeypatch.setattr("kvtool.core.remote.send._LONGER", 0.0)
    hold_at(blobs, "sweep-ghost", time.time() + 1000)  # clocks may differ by that
    push(store, blobs)
    assert is_whole(blobs)


def test_push_verify_renews_its_lease(store: Store, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a large shared store for hours: a deletion would take what is found sound, and nobody counts on yet."""
    push(store, blobs)
    seen = list[str]()
    real = type(blobs).get
    monkeypatch.setattr("kvtool.core.remote.send._RENEWED_EVERY", -1.0)
    monkeypatch.setattr(type(blobs), "hold", lambda self, name: seen.append(name))
    monkeypatch.setattr(type(blobs), "get", lambda self, names: (seen.append("get"), real(self, names))[1])
    push(store, blobs, PushOptions(verify=True))
    inside = seen[seen.index(next(name for name in seen if name != "get")) :]
    assert "get get" not in " ".join(inside)


def test_push_with_lagging_lists(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(blobs), "names", lambda self, below="": iter(()))
    monkeypatch.setattr(ObjectBlobs, "_list", lambda self, folder: iter(()))
    monkeypatch.setattr(object_store, "_MANY", 0)
    push(store, blobs)
    assert push(store, blobs).bytes == 0
    forget(store, "f2")
    assert push(store, blobs, PushOptions(delete=True)).removed == 0
    assert is_whole(blobs)
    assert pull(tmp_path / "pulled", blobs).damaged == []
    assert sources_of(tmp_path / "pulled") == ["f0", "f1"]


def test_concurrent_pushes(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(new_store(tmp_path / "second", files=0)) as second:
        add(second, "g", "g.0")
        real, calls = type(blobs).compare_and_swap, []

        def compare_and_swap(self: Blobs, name: str, before: bytes | None, after: bytes) -> bool:
            calls.append(name)
            if len(calls) == 1:
                push(second, blobs)
            return real(self, name, before, after)

        monkeypatch.setattr(type(blobs), "compare_and_swap", compare_and_swap)
        push(store, blobs)
    assert len(calls) == 3
    assert len(read_catalogue(blobs).files) == 4
