"""Push, pull and questions × every fault of every backend: losses are reported, nothing is wrong, and the next run
completes."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.common.urls import KINDS
from kvtool.core.errors import KvtoolError, StoreNotFoundError
from kvtool.core.remote import blobs as blobs_module
from kvtool.core.remote import object_store, send
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import HEAD, records_wanted
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.mirror import open_shared
from kvtool.core.remote.options import PullOptions, PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.chaos.processes import run
from tests.chaos.remote_faults import READING, SENDING, VALUES, Cell, Harm, cells, count_reads
from tests.chaos.test_hostile_values import CODEC
from tests.remote.backends import BACKENDS, Scene, Site
from tests.remote.object_stub import Way
from tests.remote.test_sharing import is_whole, store
from tests.remote.test_transfer import PROFILE
from tests.stores import LAYERS, add, bytes_of, forget, id_of, new_store, sources_of

__all__ = ["store"]

SECRETS = re.compile("zqxwv", re.I)
CHUNKS = [id_of(f"f{file}.{number}") for file in range(3) for number in range(2)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = new_store(tmp_path_factory.mktemp("pristine") / "store")
    with Store.open(path) as store, store.writer() as writer:
        writer.put_profile(PROFILE, b"a profile", CODEC | {"profile": PROFILE.hex()})
    return path


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pristine: Path) -> Iterator[Site]:
    """Make a shared store on a backend, with a pack for each chunk; note how much of it comes in a pull."""
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(send, "PACK_BYTES", 1)
        patch.setattr(object_store, "_RETRIES", 1)
        patch.setenv("KVTOOL_HOME", str(folder / "pushing"))
        made = BACKENDS[request.param].make(request.getfixturevalue, folder, patch, stack)
        if "http" in BACKENDS[request.param].kinds:
            made.way = stack.enter_context(closing(Way(made.port)))
        made.reach()
        with closing(scene := Scene(made)), scene.behind() as blobs, Store.open(pristine) as store:
            push(store, blobs)
            patch.setenv("KVTOOL_HOME", str(folder / "home"))  # copies of the catalogue stay there
            with closing(scene.blobs()) as blobs:
                made.pulled = counted(scene, lambda: pull(folder / "pulled", blobs))
            open_shared(made.url).close()
            made.asked = counted(scene, lambda: read_all(scene, 30.0, []))
        yield made


def counted(scene: Scene, what: Callable[[], object]) -> float:
    begun, reads = scene.link.sent if scene.link else 0, [0]
    with scene.made(lambda scene: count_reads(scene, reads), 0):
        what()
    return scene.link.sent - begun if scene.link else reads[0]


@pytest.fixture
def scene(site: Site) -> Iterator[Scene]:
    with closing(Scene(site)) as made:
        yield made


def check(place: Path, pristine: Path, whole: bool = False) -> None:
    if not place.exists() and not whole:
        return
    with Store.open(place) as store:
        assert verify(store) == []
    assert {*bytes_of(place)} <= {*bytes_of(pristine)}
    assert not whole or bytes_of(place) == bytes_of(pristine)


def check_error(error: KvtoolError, cell: Cell) -> None:
    codes = cell.code if isinstance(cell.code, tuple) else (cell.code,)
    assert error.exit_code in codes or (cell.perhaps and not cell.code), error.message
    assert cell.status in error.message
    assert error.hint
    assert not SECRETS.search(f"{error.message} {error.hint} {error.__cause__}")


@pytest.mark.some(3)
@pytest.mark.parametrize(("site", "cell"), cells(READING), indirect=["site"])
def test_pull_of_a_broken_store(cell: Cell, scene: Scene, pristine: Path, tmp_path: Path) -> None:
    with scene.made(cell.make, scene.site.pulled / 2), closing(scene.blobs(cell.patience)) as blobs:
        try:
            report = pull(tmp_path / "pulled", blobs, PullOptions(remote_timeout=cell.patience))
        except KvtoolError as error:
            check_error(error, cell)
        else:
            assert not cell.code or cell.perhaps
            check(tmp_path / "pulled", pristine, whole=not report.damaged)
    check(tmp_path / "pulled", pristine)
    with closing(scene.blobs()) as blobs:
        assert pull(tmp_path / "pulled", blobs).damaged == []
    check(tmp_path / "pulled", pristine, whole=True)


MIDDLE = {fault: row for fault, row in READING.items() if re.search("middle|once|half|crawls|nobody", fault)}


@pytest.mark.some(2)
@pytest.mark.parametrize(("site", "cell"), cells(MIDDLE), indirect=["site"])
def test_question_to_a_broken_store(cell: Cell, scene: Scene, pristine: Path) -> None:
    told: list[str] = []
    open_shared(scene.site.url).close()
    with scene.made(cell.make, scene.site.asked / 2):
        found = read_all(scene, cell.patience, told)
    with Store.open(pristine) as store:
        for (chunk, layer), record in found.items():
            assert record is None or record == bytes(store.read_kv(chunk, "raw", layer)[1])  # type: ignore[index]
    assert len(told) <= 1
    assert told or cell.perhaps or not cell.code
    assert not told or (cell.code and cell.status in told[0]) or cell.perhaps
    whole = read_all(scene, 30.0, told)
    assert None not in whole.values()


def read_all(scene: Scene, patience: float, told: list[str]) -> dict[tuple[bytes, int], bytes | None]:
    """Read layer by layer, as a question does; None: a hole."""
    found: dict[tuple[bytes, int], bytes | None] = {}
    with open_shared(scene.site.url, timeout=patience, warn=lambda text, hint: told.append(text)) as store:
        for layer in range(LAYERS):
            for chunk, read in zip(CHUNKS, store.read_layer(CHUNKS, "raw", layer), strict=True):
                found[chunk, layer] = bytes(read[1]) if isinstance(read, tuple) else None
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(("site", "cell"), cells(SENDING), indirect=["site"])
def test_push_to_a_broken_store(cell: Cell, scene: Scene, pristine: Path, tmp_path: Path) -> None:
    with Store.open(shutil.copytree(pristine, tmp_path / "more")) as store:
        add(store, "f3", "f3.0")
        with scene.made(cell.make, 1), closing(scene.blobs()) as blobs:
            try:
                push(store, blobs)
            except KvtoolError as error:
                check_error(error, cell)
            else:
                assert not cell.code
        with closing(scene.blobs()) as blobs:
            assert len(read_catalogue(blobs).files) == (3 if cell.code else 4)
            assert is_whole(blobs)
            push(store, blobs)
            assert len(read_catalogue(blobs).files) == 4
            assert is_whole(blobs)
    with Store.open(pristine) as store, scene.behind() as blobs:
        push(store, blobs, PushOptions(delete=True))


VITAL = ("head", "catalogue", "shard", "meta/manifest")  # without these nothing can be said


def one_of_each(blobs: Blobs) -> dict[str, tuple[str, bytes, bytes]]:
    names = sorted(name for name in blobs.names() if name != "head.lock")
    chunks = read_catalogue(blobs).chunks
    records = {one.pack for key, chunk in chunks.items() for one in records_wanted(key, chunk, "raw")}

    def kind_of(name: str) -> str:
        kind = name.partition("/")[0]
        return {"meta": name.partition("-")[0], "pack": f"pack {name in records}"}.get(kind, kind)

    found = {}
    for kind in {kind_of(name): "" for name in names}:
        one, *others = [name for name in names if kind_of(name) == kind]
        value, other = blobs.get([one, next(name for name in (*others, *names) if name != one)])
        assert value
        assert other
        found[kind] = one, value, other
    return found


@contextmanager
def replaced(blobs: Blobs, values: dict[str, tuple[str, bytes, bytes]], harm: Harm) -> Iterator[None]:
    for name, value, other in values.values():
        harmed = harm(value, other)
        if harmed is None:
            blobs.delete([name])
        else:
            blobs.put({name: harmed})
    try:
        yield
    finally:
        blobs.put({name: value for name, value, _ in values.values()})


@pytest.mark.slow
@pytest.mark.some(3)
@pytest.mark.parametrize("harm", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("site", BACKENDS, indirect=True)
def test_harmed_values_are_left_out(
    harm: Harm, scene: Scene, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene.behind() as behind, closing(scene.blobs()) as blobs:
        before = one_of_each(behind)
        for kind in VITAL:
            vital = {kind: before.pop(kind)}
            monkeypatch.setenv("KVTOOL_HOME", str(tmp_path / kind))  # no copy of the catalogue is there
            with replaced(behind, vital, harm), pytest.raises(KvtoolError):
                pull(tmp_path / "vital", blobs)
        with replaced(behind, before, harm):
            report = pull(tmp_path / "pulled", blobs, PullOptions(mine=True))
            for name, *_ in before.values():
                assert any(name in row["reason"] for row in report.damaged), name
            check(tmp_path / "pulled", pristine)
            with Store.open(pristine) as store:
                push(store, behind, PushOptions(verify=True))
            assert pull(tmp_path / "pulled", blobs, PullOptions(mine=True)).damaged == []
    check(tmp_path / "pulled", pristine, whole=True)


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("site", BACKENDS, indirect=True)
def test_restored_older_head(scene: Scene, pristine: Path, tmp_path: Path) -> None:
    with Store.open(shutil.copytree(pristine, tmp_path / "more")) as more, scene.behind() as behind:
        add(more, "f3", "f3.0")
        (head,) = behind.get([HEAD])
        push(more, behind)
        behind.put({HEAD: head})
        with closing(scene.blobs()) as blobs:
            assert pull(tmp_path / "pulled", blobs).damaged == []
            check(tmp_path / "pulled", pristine, whole=True)
            push(more, behind)
            assert pull(tmp_path / "pulled", blobs).damaged == []
            check(tmp_path / "pulled", more.path, whole=True)
    with Store.open(pristine) as store, scene.behind() as blobs:
        push(store, blobs, PushOptions(delete=True))


def test_every_backend_is_in_the_table() -> None:
    assert sorted(scheme for backend in BACKENDS.values() for scheme in backend.schemes) == sorted(KINDS)


# ---- pushes and pulls killed with -9, over a folder, a Redis and a bucket ----
# Buckets of others are written by the same class as those of S3.


@pytest.mark.some(3)
@pytest.mark.usefixtures("small_packs")
@pytest.mark.parametrize(
    "moment",
    [("put", 2), ("compare_and_swap", 1), ("compare_and_swap", 2), ("delete", 2)],
    ids=["some sent", "before the head", "after the head", "some deleted"],
)
def test_push_killed_with_9(
    moment: tuple[str, int],
    store: Store,
    blobs: Blobs,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push(store, blobs)
    forget(store, "f2")
    add(store, "f3", "f3.0", "f3.1")
    assert run(store.path, "send", url, *moment).returncode == -signal.SIGKILL
    before, after = ["f0", "f1", "f2"], ["f0", "f1", "f3"]
    assert is_whole(blobs)
    assert pull(tmp_path / "then", blobs).damaged == []
    with Store.open(tmp_path / "then") as then:
        # A bucket's leases are deleted, too: there the second deletion comes before the head.
        is_in = moment == ("compare_and_swap", 2) or (moment == ("delete", 2) and not url.startswith("s3"))
        assert then.sources() == (after if is_in else before)
        assert verify(then) == []
    monkeypatch.setitem(blobs_module.LEASES, "sweep", 0.4)  # the dead one's is waited for
    push(store, blobs, PushOptions(delete=True))
    assert is_whole(blobs)
    assert pull(tmp_path / "pulled", blobs).damaged == []
    assert sources_of(tmp_path / "pulled") == after
    assert bytes_of(tmp_path / "pulled") == bytes_of(store.path)


@pytest.mark.usefixtures("small_packs")
def test_first_push_killed_before_its_head(store: Store, blobs: Blobs, url: str) -> None:
    assert run(store.path, "send", url, "compare_and_swap", 1).returncode == -signal.SIGKILL
    with pytest.raises(StoreNotFoundError):
        read_catalogue(blobs)
    assert push(store, blobs).chunks.transferred == 0  # they are there already
    assert len(read_catalogue(blobs).files) == 3
    assert is_whole(blobs)


@pytest.mark.some(3)
@pytest.mark.usefixtures("small_packs")
@pytest.mark.parametrize("moment", [("set_manifest", 2), ("put_chunk", 6), ("commit_files", 2)])
def test_pull_killed_with_9(moment: tuple[str, int], store: Store, blobs: Blobs, url: str, tmp_path: Path) -> None:
    push(store, blobs)
    everything = pull(tmp_path / "whole", blobs).bytes
    assert run(tmp_path / "pulled", "receive", url, *moment).returncode == -signal.SIGKILL
    with Store.open(tmp_path / "pulled") as pulled:
        assert verify(pulled) == []
        assert {*pulled.sources()} <= {*store.sources()}
    report = pull(tmp_path / "pulled", blobs)
    assert report.damaged == []
    assert report.bytes < everything
    assert sources_of(tmp_path / "pulled") == store.sources()
    assert bytes_of(tmp_path / "pulled") == bytes_of(store.path)
