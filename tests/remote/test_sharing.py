"""A shared store of several users: nothing of another's is deleted, with any concurrent runs, and nothing piles up."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.integrity import repair, verify
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.errors import NoSpaceError, RemoteError, StoreFormatError
from kvtool.core.remote import catalogue, catalogue_io, values
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue import HEAD, digest_of, is_own, unseal_head
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests import stores
from tests.cli.working import Done, files_below, kvtool
from tests.stores import LAYERS, add, check_file, forget, id_of, new_store, payload_of

pytestmark = pytest.mark.usefixtures("small_packs")

WORDS = ("kv", "file", "head2", "profile/notes.txt", "catalogue/2024.csv", "kv/me/raw-1/0", "chunk/holiday.jpg")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(new_store(tmp_path / "store")) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with Store.open(new_store(tmp_path / "other", files=1)) as opened:
        add(opened, "g", "g.0")
        yield opened


def put_foreign(blobs: Blobs, names: tuple[str, ...] = WORDS) -> dict[str, bytes]:
    values = {name: f"my {name}".encode() for name in names if "/" in name or name not in ("kv", "file")}
    blobs.put(values)
    return values


def is_whole(blobs: Blobs) -> bool:
    return all(blobs.sizes(sorted(read_catalogue(blobs).blobs())))


def after_first(monkeypatch: pytest.MonkeyPatch, blobs: Blobs, method: str, then: Callable[[], object]) -> None:
    real, called = getattr(blobs, method), []

    def wrapped(*args: Any) -> Any:
        result = real(*args)
        if not called:
            called.append(1)
            then()
        return result

    monkeypatch.setattr(blobs, method, wrapped)


def pushed_by(store: Store, url: str, **options: bool) -> Callable[[], None]:
    def run() -> None:
        with closing(open_blobs(url)) as own:
            push(store, own, PushOptions(**options))

    return run


# ---- what is whose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [WORDS, (HEAD,)], ids=["files", "head"])
def test_push_into_a_folder_with_other_files_is_refused(names: tuple[str, ...], store: Store, blobs: Blobs) -> None:
    values = put_foreign(blobs, names)
    for options in ({"verify": True}, *([{}, {"delete": True, "yes": True}] if names == WORDS else [])):
        with pytest.raises(StoreFormatError):
            push(store, blobs, PushOptions(**options))
    assert set(blobs.names()) == set(values)
    assert blobs.get(list(values)) == list(values.values())


def test_push_delete_keeps_foreign_values(store: Store, blobs: Blobs) -> None:
    push(store, blobs)
    values = put_foreign(blobs)
    forget(store, "f2")
    report = push(store, blobs, PushOptions(delete=True))
    assert report.removed == 2 * 2 + 1 + 2  # a file, two chunks and their KV in a pack each, a catalogue and its shard
    assert report.bytes_freed > 0
    assert blobs.get(list(values)) == list(values.values())
    assert is_whole(blobs)


@pytest.mark.parametrize("name", ["inner", "deep/er/kv"])
def test_push_delete_keeps_a_nested_store(name: str, store: Store, blobs: Blobs, url: str, tmp_path: Path) -> None:
    push(store, blobs)
    inner = f"{url}/{name}"
    pushed_by(store, inner)()
    forget(store, "f1", "f2")
    push(store, blobs, PushOptions(delete=True, yes=True))
    with closing(open_blobs(inner)) as opened:
        assert is_whole(opened)
        assert len(pull(tmp_path / "pulled", opened).damaged) == 0
    assert is_whole(blobs)


def test_push_around_or_inside_another_store_is_refused(store: Store, url: str) -> None:
    inner = f"{url}/inner"
    pushed_by(store, inner)()
    for place in (url, f"{url}/inner/pack", f"{url}/inner/shard"):
        with pytest.raises(StoreFormatError):
            pushed_by(store, place)()


def test_push_delete_keeps_values_below_another_head(store: Store, blobs: Blobs) -> None:
    push(store, blobs)
    forget(store, "f2")
    inner = f"kv/{id_of('f2.0').hex()}"
    blobs.put({f"{inner}/head": b"of somebody"})
    spared = set(blobs.names(inner)) | set(blobs.names(f"{inner}/"))
    assert push(store, blobs, PushOptions(delete=True)).removed > 0
    assert set(blobs.names(inner)) == spared


def test_push_delete_follows_no_link(store: Store, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    root = tmp_path / "shared"
    with closing(open_blobs(f"file://{root}")) as blobs:
        push(store, blobs)
        moved = root.joinpath("pack").rename(precious / "pack")
        (root / "pack").symlink_to(moved)
        before = files_below(precious)
        forget(store, "f2")
        push(store, blobs, PushOptions(delete=True, yes=True))
        assert files_below(precious) == before
        add(store, "f3", "f3.0")
        with pytest.raises(RemoteError):
            push(store, blobs)
        assert files_below(precious) == before


def test_names_of_pushed_values(store: Store, blobs: Blobs) -> None:
    with store.writer() as writer:
        writer.put_profile(bytes.fromhex(digest_of(b"a profile")), b"a profile", {"profile": digest_of(b"a profile")})
    push(store, blobs)
    names = set(blobs.names())
    assert {name.split("/")[0] for name in names} >= {"head", "catalogue", "shard", "meta", "profile", "pack"}
    assert [name for name in names if not is_own(name) and name != "head.lock"] == []
    for name in WORDS:
        assert not is_own(name)


# ---- asked first ------------------------------------------------------------------------------------------------


def test_push_dry_run_counts_and_changes_nothing(store: Store, blobs: Blobs) -> None:
    expected = push(store, blobs, PushOptions(dry_run=True))
    assert set(blobs.names()) == set()
    done = push(store, blobs)
    assert (expected.files, expected.chunks, expected.bytes) == (done.files, done.chunks, done.bytes)
    forget(store, "f1", "f2")
    add(store, "f3", "f3.0")
    before = {name: blobs.get([name]) for name in blobs.names()}
    expected = push(store, blobs, PushOptions(delete=True, dry_run=True))
    assert {name: blobs.get([name]) for name in blobs.names()} == before
    done = push(store, blobs, PushOptions(delete=True, yes=True))
    for field in ("files", "chunks", "bytes", "removed", "bytes_freed", "documents_removed"):
        assert getattr(expected, field) == getattr(done, field), field
    assert done.documents_removed == 2
    assert expected.dry_run


def test_push_delete_command(store: Store, blobs: Blobs, url: str) -> None:
    def run(*more: str) -> Done:
        return kvtool("store", "push", url, "--store", store.path, *more)

    run().fine()
    forget(store, "f1", "f2")
    value = run("--delete", "--dry-run", "--json").fine().json
    assert (value["dry_run"], value["removed"], value["documents_removed"]) == (True, 12, 2)
    assert value["bytes_freed"] > 0
    assert "12 would be removed" in run("--delete", "--dry-run").fine().out
    before = set(blobs.names())
    run("--delete", "--json").failed(2, "--yes")
    assert (set(blobs.names()), len(read_catalogue(blobs).files)) == (before, 3)
    assert "12 removed" in run("--delete", "--yes").fine().out
    blobs.delete([HEAD])
    put_foreign(blobs)
    run().failed(12)


# ---- what is gone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["gone", "empty", "cut off"])
def test_push_replaces_missing_and_cut_values(harm: str, store: Store, blobs: Blobs) -> None:
    """Resume a push after a power loss, too: a value that has a name is not trusted to be whole."""
    push(store, blobs)
    before = {name: blobs.get([name])[0] for name in read_catalogue(blobs).blobs()}
    for name, value in before.items():
        blobs.delete([name]) if harm == "gone" else blobs.put({name: b"" if harm == "empty" else value[:-7]})
    report = push(store, blobs)
    assert {name: blobs.get([name])[0] for name in before} == before
    assert report.bytes == sum(len(value) for value in before.values() if value is not None)
    assert (report.files.transferred, report.chunks.transferred) == (3, 6)
    assert push(store, blobs).bytes == 0


@pytest.mark.usefixtures("no_packs")
def test_push_replaces_a_partly_lost_level(
    store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, blobs)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "payload_of", lambda *args, real=payload_of: [part[::-1] for part in real(*args)])
        machine = new_store(tmp_path / "machine")
    names = sorted(blobs.names(f"kv/{id_of('f0.0').hex()}/"))
    blobs.delete(names[1:])
    with Store.open(machine) as own:
        assert push(own, blobs).damaged == []
        assert is_whole(blobs)
        wanted = [bytes(own.read_kv(id_of("f0.0"), "raw", layer)[1]) for layer in range(LAYERS)]  # type: ignore[index]
    pull(tmp_path / "pulled", blobs)
    with Store.open(tmp_path / "pulled") as pulled:
        assert [bytes(pulled.read_kv(id_of("f0.0"), "raw", n)[1]) for n in range(LAYERS)] == wanted  # type: ignore[index]
        check_file(pulled, "f1")


# ---- what is left over ------------------------------------------------------------------------------------------


def test_repeated_pushes_do_not_grow_the_store(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    counts = []
    for number in range(7):
        add(store, "f1", f"version {number}")
        forget(store)
        push(store, blobs)
        counts.append(len(list(blobs.names())))
    assert counts[4:] == counts[3:-1]
    assert len(list(blobs.names("catalogue/"))) == 3
    assert is_whole(blobs)
    assert pull(tmp_path / "pulled", blobs).damaged == []


def test_head_stays_bounded_during_other_pushes(store: Store, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.remote.send._MOST_BEFORE", 3)
    blobs.hold("push-other")
    for number in range(6):
        add(store, "f1", f"version {number}")
        push(store, blobs)
    (head,) = blobs.get([HEAD])
    assert len(unseal_head(head).before) == 3
    assert len(list(blobs.names("catalogue/"))) == 6  # nothing was deleted


@pytest.mark.some(3)
@pytest.mark.parametrize("table", [tables.DOCUMENTS, tables.CHUNKS])
@pytest.mark.parametrize("harm", ["damaged", "lost"])
def test_push_of_a_damaged_store_deletes_nothing(
    table: bytes, harm: str, store: Store, blobs: Blobs, tmp_path: Path
) -> None:
    push(store, blobs)
    before = set(blobs.names())
    row = (table, tables.name_key("f1") if table == tables.DOCUMENTS else id_of("f1.0"))
    with store.snapshot() as snapshot:
        value = snapshot.get(*row)
    with store.writer() as writer:
        writer.commit([(*row, bytes(value[:-1]))] if harm == "damaged" else [], [row] if harm == "lost" else [])
    told: list[str] = []
    push(store, blobs, PushOptions(delete=True, yes=True), events=Events(warn=lambda text, hint: told.append(text)))
    assert len(told) == 1
    assert "was deleted" in told[0]
    assert before <= set(blobs.names())
    assert pull(tmp_path / "pulled", blobs).files.transferred == 3
    with store.writer() as writer:
        repair(store, writer, verify(store))
    pull(store.path, blobs)
    assert verify(store) == []
    assert push(store, blobs, PushOptions(delete=True)).damaged == []


def test_prune_during_a_push(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop it as a prune does: else every pull would miss it, and the next pushes would take it for there."""
    surveyed = values.Survey.catalogue

    def then_pruned(*given: Any, **more: Any) -> Any:
        found = surveyed(*given, **more)
        with Store.open(store.path) as other, other.writer() as writer:
            writer.drop_level([id_of("f1.0")], "raw")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(values.Survey, "catalogue", then_pruned)
        assert [row["reason"] for row in push(store, blobs).damaged] == ["layer 0 is not stored"]
    assert pull(tmp_path / "pulled", blobs).damaged == []


# ---- files in a shared folder -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def in_folder(folder: Path) -> Iterator[Blobs]:
    with closing(open_blobs(f"file://{folder}")) as opened:
        yield opened


@pytest.mark.parametrize("part", [catalogue, catalogue_io], ids=["head", "root"])
def test_push_and_pull_of_another_format(
    part: ModuleType, store: Store, in_folder: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(part, "FORMAT", 2)
        push(store, in_folder)
    for command in (("push", in_folder.url, "--store", store.path), ("pull", in_folder.url, "--store", store.path)):
        kvtool("store", *command).failed(12)
    kvtool("inspect", "--store", in_folder.url).failed(12)


def test_link_at_a_temporary_name_is_not_followed(
    in_folder: Blobs, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / "a").mkdir(parents=True)
    (folder / f"a/.tmp-{os.getpid()}-b").symlink_to(precious)  # the name that used to be taken
    in_folder.put({"a/b": b"value"})
    assert precious.read_text() == "mine"
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)  # and if somebody could foresee it
    (folder / f"a/.tmp-{os.getpid()}-{'0' * 16}").symlink_to(precious)
    with pytest.raises(RemoteError):
        in_folder.put({"a/b": b"other"})
    assert precious.read_text() == "mine"
    assert in_folder.get(["a/b"]) == [b"value"]


def test_push_to_a_full_disk_leaves_no_temporary_file(
    in_folder: Blobs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError):
        in_folder.put({"a/b": b"1", "a/c": b"2"})
    assert files_below(folder) == {}


def test_old_files_of_killed_pushes_are_removed(store: Store, in_folder: Blobs, folder: Path) -> None:
    push(store, in_folder)
    left = [folder / "meta/.tmp-12-0123456789abcdef", folder / "pack/.tmp-1-abc", folder / "catalogue/.tmp-1-00ff"]
    for exist, time in ((True, None), (False, (1, 1))):  # somebody may be writing new ones
        for path in left:
            path.write_bytes(b"half of a value")
            os.utime(path, time)
        push(store, in_folder, PushOptions(delete=True))
        assert [path.exists() for path in left] == [exist] * 3
