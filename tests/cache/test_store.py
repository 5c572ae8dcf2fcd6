"""The store in one process: what was put reads back, and unused chunks are removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.core.cache import environment, layout, side_files, tables
from kvtool.core.cache import reader as module
from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.record import encode_record
from kvtool.core.cache.side_files import HALF_LIFE
from kvtool.core.cache.store import Store
from kvtool.core.cache.tree import DataFile
from kvtool.core.errors import KvtoolError, UsageError
from tests.stores import (
    LAYERS,
    LEAD_IN,
    TOKENS,
    add_file,
    check_file,
    header_of,
    id_of,
    ids_of,
    info_of,
    make_store,
    payload_of,
    put,
    records_of,
)
from tests.wording import refused


def test_round_trip(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    with Store.open(path) as store:
        assert store.path == path
        assert store.manifest() == {"model": "tiny"}
        assert [entry.path for entry in store.files()] == store.sources() == ["f0", "f1"]
        assert [document.source for document in store.documents()] == ["f0", "f1"]
        assert len(store.chunk_ids()) == 4
        check_file(store, "f0")
        check_file(store, "f1")
        assert store.levels(id_of("f0.0")) == ["raw"]
        assert store.has_chunk(id_of("f0.0"))
        assert verify(store) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "store") as store:
        assert store.manifest() == {}
        assert store.revision() == 0
        assert list(store.files()) == store.sources() == store.chunk_ids() == []
        assert store.file("x") is store.document("x") is store.chunk_info(id_of("x")) is None
        assert store.read_kv(id_of("x"), "raw", 0) is None
        assert store.levels(id_of("x")) == []
        assert not store.has_chunk(id_of("x"))
        assert verify(store) == []
        with refused(ValueError, numbers=True):
            store.read_kv(b"short", "raw", 0)


def test_read_layer_keeps_order_and_gives_private_aligned_writable_views(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", dim=512)
    wanted = [id_of("f1.1"), id_of("none"), id_of("f0.0"), id_of("f1.1")]
    with Store.open(path) as store:
        first, missing, second, again = store.read_layer(wanted, "raw", 1)
        assert missing is None
        for found, label in ((first, "f1.1"), (second, "f0.0"), (again, "f1.1")):
            assert isinstance(found, tuple)
            assert found[0] == header_of(1, dim=512)
            assert bytes(found[1]) == b"".join(payload_of(label, 1, dim=512))
        assert isinstance(first, tuple)
        assert isinstance(again, tuple)
        first[1][0] ^= 255
        assert bytes(again[1]) == b"".join(payload_of("f1.1", 1, dim=512))
    assert len(bytes(first[1])) == first[1].nbytes  # after close, too


def test_part_of_a_record_in_memory_is_not_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(file: DataFile, head: bytearray, rest: memoryview, at: int) -> int:
        return os.preadv(file._handle, [head, rest[:100]], at)

    monkeypatch.setattr(DataFile, "_copy_cached", some)
    with Store.open(make_store(tmp_path / "store", dim=512)) as store:
        (found,) = store.read_layer([id_of("f1.1")], "raw", 1)
        assert isinstance(found, tuple)
        assert bytes(found[1]) == b"".join(payload_of("f1.1", 1, dim=512))


def test_a_level_is_there_when_all_its_layers_are(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    chunk = id_of("f0.0")
    with Store.open(path) as store, store.writer() as writer:
        for level in ("1", "10", "lossless"):
            writer.put_chunk(chunk, info_of("f0.0"), level, records_of("f0.0", level))
        writer.flush()
        assert store.levels(chunk) == ["1", "10", "lossless", "raw"]
        assert writer.drop_level([chunk], "1") == 1
        assert writer.drop_level([chunk], "1") == 0
        assert store.levels(chunk) == ["10", "lossless", "raw"]
        assert store.read_kv(chunk, "1", 0) is None
        assert store.read_kv(chunk, "10", LAYERS - 1) is not None
        assert store.stats()["levels"]["10"]["chunks"] == 1


@pytest.mark.parametrize(
    ("info", "level", "layers"),
    [
        (info_of("a"), "raw", records_of("a")[:1]),
        (info_of("a"), "raw", records_of("a")[::-1]),
        (info_of("a"), "1", records_of("a")),
        (info_of("a"), "raw", records_of("b")),
        (info_of("a"), "raw", [b"", b""]),
        (ChunkInfo((1, 2), LEAD_IN, LAYERS), "raw", records_of("a")),
        (ChunkInfo(ids_of("a"), LEAD_IN, 0), "raw", []),
    ],
)
def test_records_of_something_else_are_refused(
    tmp_path: Path, info: ChunkInfo, level: str, layers: list[bytes]
) -> None:
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as writer:
        with pytest.raises(ValueError):
            writer.put_chunk(id_of("a"), info, level, layers)
        assert not writer.has_chunk(id_of("a"))


def test_a_stored_record_is_never_written_again(tmp_path: Path) -> None:
    """Keep the first one: another process may have computed it in another rounding."""
    path = make_store(tmp_path / "store")
    other = [encode_record(id_of("f0.0"), header_of(layer), payload_of("other", layer)) for layer in range(LAYERS)]
    with Store.open(path) as store:
        with store.writer() as writer:
            writer.put_chunk(id_of("f0.0"), info_of("f0.0"), "raw", other)
        check_file(store, "f0")


def test_sensitivity_can_come_later_other_tokens_cannot(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    chunk, info = id_of("f0.0"), info_of("f0.0")
    side = ChunkInfo(info.token_ids, info.lead_in, info.layers, b"\1\2" * TOKENS)
    with Store.open(path) as store:
        with store.writer() as writer:
            writer.put_chunk(chunk, side, "raw", records_of("f0.0"))
        assert store.chunk_info(chunk) == side
        with store.writer() as writer:
            writer.put_chunk(chunk, info, "raw", records_of("f0.0"))
        assert store.chunk_info(chunk) == side
        wrong = ChunkInfo(ids_of("f0.1"), info.lead_in, info.layers)
        with refused(ValueError), store.writer() as writer:
            writer.put_chunk(chunk, wrong, "raw", records_of("f0.0"))
        assert store.chunk_info(chunk) == side


def test_a_document_needs_its_chunks(tmp_path: Path) -> None:
    ref = ChunkRef(id_of("nobody"), 0, 1, 1)
    entry = FileEntry("a", 1, 2, "d", "s", ("a",))
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as writer:
        for documents in ([DocumentEntry("a", "text", "", (ref,))], []):
            with refused(ValueError):
                writer.commit_file(entry, documents)
        assert store.revision() == 0


def test_the_same_chunk_twice(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "store") as store:
        with store.writer() as writer:
            add_file(writer, "a", ["same", "same"])
            add_file(writer, "b", ["same"])
        assert len(store.chunk_ids()) == 1
        assert store.stats()["tokens"] == TOKENS


def test_edit_remove_collect(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    with Store.open(path) as store, store.writer() as writer:
        before = store.revision()
        add_file(writer, "f0", ["f0.0", "new"])
        assert store.revision() == store.documents_revision() == before + 1
        assert writer.collect() == 1
        assert (store.revision(), store.documents_revision()) == (before + 2, before + 1)
        assert not store.has_chunk(id_of("f0.1"))
        assert writer.remove_file("f1")
        assert not writer.remove_file("f1")
        assert store.revision() == store.documents_revision() == before + 3
        assert store.file("f1") is store.document("f1") is None
        assert writer.collect() == 2
        assert writer.collect() == 0
        assert sorted(store.chunk_ids()) == sorted([id_of("f0.0"), id_of("new")])
        assert verify(store) == []


def test_a_file_that_gives_fewer_documents(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as writer:
        ref = put(writer, "a")
        two = [DocumentEntry(name, "jsonl", "t", (ref,)) for name in ("f#1", "f#2")]
        writer.commit_file(FileEntry("f", 1, 2, "d", "s", ("f#1", "f#2")), two)
        assert store.sources() == ["f#1", "f#2"]
        writer.commit_file(FileEntry("f", 1, 2, "d", "s", ("f#2",)), two[1:])
        assert store.sources() == ["f#2"]
        assert store.document("f#1") is None


def test_collect_spares_what_waits_for_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.cache.writer.BATCH_BYTES", 1)
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as pen:
        put(pen, "early")
        assert store.has_chunk(id_of("early"))  # written in a batch of its own
        assert pen.collect() == 0
        add_file(pen, "f", ["early"])
        assert pen.collect() == 0


def test_leaving_by_an_error_drops_what_is_buffered(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "store") as store:
        with contextlib.suppress(KeyboardInterrupt), store.writer() as pen:
            put(pen, "a")
            raise KeyboardInterrupt
        assert store.chunk_ids() == []
        with refused(KvtoolError):
            put(pen, "a")
        with store.writer() as pen:
            put(pen, "a")
        assert store.chunk_ids() == [id_of("a")]


def test_names_of_any_kind(tmp_path: Path) -> None:
    names = ["", "a" * 5000, "new\nline", "\x1b[31m", "한글/é.txt", "\udcff.bin", "-rf", "nul\0"]
    with Store.create_or_open(tmp_path / "store") as store:
        with store.writer() as pen:
            for name in names:
                add_file(pen, name, [name])
        assert store.sources() == sorted(names)
        for name in names:
            document = store.document(name)
            assert document is not None
            assert document.text == name


def test_stats(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        stats = store.stats()
    size = sum(len(record) for label in ("f0.0", "f0.1", "f1.0", "f1.1") for record in records_of(label))
    assert (stats["files"], stats["documents"], stats["chunks"], stats["records"]) == (2, 2, 4, 8)
    assert stats["tokens"] == 4 * TOKENS
    assert stats["bytes"] == stats["levels"]["raw"]["bytes"] == size
    assert 0 < stats["live_bytes"] <= stats["file_bytes"]
    assert stats["disk_free"] > 0


def test_access_notes(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    used, bogus = id_of("f0.0"), b"damaged line\n" + b"0" * 40 + b" 12 00000000\n"
    with Store.open(path) as store:
        store.note_access([used])
        store.note_access([used, id_of("f1.0")])
    with (path / "access.log").open("ab") as log:
        log.write(bogus)
    with Store.open(path) as store:
        assert sorted(store.last_used()) == sorted([used, id_of("f1.0")])  # noted, and not in the store yet
        assert store.times(tables.USED) == {}
        with store.writer() as pen:
            pen.collect()
        assert sorted(store.times(tables.USED)) == sorted([used, id_of("f1.0")])
        assert sorted(store.last_used()) == sorted([used, id_of("f1.0")])
        assert not list(path.glob("access.log*"))
        with store.writer() as pen:
            pen.drop_chunks([used])
        assert list(store.last_used()) == [id_of("f1.0")]


def test_every_use_warms_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the order of notes and folds makes no difference, but for a second of rounding at each fold."""
    path, often, late = make_store(tmp_path / "store"), id_of("f0.0"), id_of("f1.0")
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(side_files, "time", SimpleNamespace(time=lambda: clock.now))
    with Store.open(path) as store, Store.open(path) as other:
        for at in range(4):
            (store if at % 2 else other).note_access([often])
            if at == 1:
                with store.writer() as pen:
                    pen.fold_access()
        other.flush()
        warm = store.warmth()
        assert warm[often] == pytest.approx(1e9 + 2 * HALF_LIFE, abs=2)
        clock.now += 1.5 * HALF_LIFE
        store.note_access([late])
        assert store.warmth()[often] > store.warmth()[late]
        clock.now += HALF_LIFE
        store.note_access([late])
        assert store.warmth()[often] < store.warmth()[late]
        assert store.last_used() == {often: 10**9, late: int(clock.now)}
        with store.writer() as pen:
            pen.fold_access()
            pen.drop_chunks([often])
        assert [*store.warmth()] == [late]


def test_a_use_is_known_at_once_and_wherever_it_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note it in this process, in the log, in a log of a writer that died, and by another process's open store."""
    path, used = make_store(tmp_path / "store"), id_of("f0.0")
    with Store.open(path) as store, Store.open(path) as other:
        store.note_access([used])
        assert list(store.last_used()) == [used]
        other.note_access([id_of("f1.0")])
        monkeypatch.setattr(module, "_NOTES_SECONDS", -1.0)
        assert id_of("f1.0") not in store.last_used()
        other.note_access([used])
        assert sorted(store.last_used()) == sorted([used, id_of("f1.0")])
        (path / "access.log").rename(path / "access.log.folding")
        assert sorted(store.last_used()) == sorted([used, id_of("f1.0")])
        monkeypatch.setattr(side_files, "_LONG_LOG_BYTES", 10)
        with store.writer() as pen:
            pen.fold_access()
            store.note_access([id_of("f0.1")])
        assert sorted(store.times(tables.USED)) == sorted([used, id_of("f1.0"), id_of("f0.1")])


def test_compact_gives_bytes_back_and_others_follow(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=6, dim=256)
    with Store.open(path) as store, Store.open(path) as other:
        with store.writer() as pen:
            for number in range(1, 6):
                pen.remove_file(f"f{number}")
            pen.collect()
            assert pen.compact() > 0
        check_file(store, "f0", dim=256)
        check_file(other, "f0", dim=256)
        assert other.revision() == store.revision()
        with other.writer() as pen:
            add_file(pen, "later", ["later"])
        check_file(store, "f0", dim=256)
        assert store.revision() == other.revision()
        assert store.sources() == ["f0", "later"]
    assert [folder.name for folder in (path / "data").iterdir()] == ["gen-2"]


@pytest.mark.parametrize("umask", [0, 0o777])
def test_folders_and_files_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        path = make_store(tmp_path / "store")
        with Store.open(path) as store:
            layout.atomic_write(store.side_file("gate/verdict.json"), b"{}")
            store.note_access([id_of("f0.0")])
            store.flush()
            with store.writer():
                modes = _modes(path)
            assert store.concerns() == []
            path.chmod(0o777)
            assert "written by others" in store.concerns()[0]
    finally:
        os.umask(old)
    assert {"writer.json", "gate", "verdict.json", "access.log", "data.mdb", "lock.mdb"} <= set(modes)
    assert set(modes.values()) == {"drwx------", "-rw-------"}


def _modes(path: Path) -> dict[str, str]:
    return {entry.name: stat.filemode(entry.lstat().st_mode) for entry in [path, *path.rglob("*")]}


@pytest.mark.parametrize("name", ["x", "/etc/x", "../x", "gate/../../x", "data/gen-1/data.mdb"])
def test_side_files_stay_inside(tmp_path: Path, name: str) -> None:
    with Store.create_or_open(tmp_path / "store") as store, refused(ValueError):
        store.side_file(name)


@pytest.mark.slow
def test_moved_and_copied_stores_read_the_same(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    shutil.copytree(path, tmp_path / "copy")
    path.rename(tmp_path / "moved")
    for place in ("copy", "moved"):
        with Store.open(tmp_path / place) as store:
            check_file(store, "f0")
            check_file(store, "f1")
            assert verify(store) == []


def test_verify_samples_the_same_part(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        assert verify(store, Fraction(1, 7)) == []
        with refused(ValueError):
            verify(store, Fraction(3, 2))


@pytest.mark.slow
def test_one_environment_for_many_stores_and_threads(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=4)

    def read() -> None:
        for _ in range(30):
            with Store.open(path) as own:
                check_file(own, "f1")
            check_file(shared, "f2")

    with Store.open(path) as shared, ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read) for _ in range(4)]
        with shared.writer() as pen:
            for number in range(10):
                add_file(pen, f"g{number}", [f"g{number}.0"])
        for each in reading:
            each.result()
    assert path / "data" not in {one.generation.parent for one in environment._open_environments.values()}


def test_the_file_grows_under_readers(tmp_path: Path) -> None:
    done = threading.Event()
    path = make_store(tmp_path / "store", files=1)

    def read() -> None:
        while not done.is_set():
            check_file(store, "f0")

    with Store.open(path) as store, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            with store.writer() as pen:
                for number in range(1, 30):
                    add_file(pen, f"f{number}", [f"f{number}.0", f"f{number}.1"], dim=256)
        finally:
            done.set()
        reading.result()
        check_file(store, "f29", dim=256)


def test_fork_is_refused(tmp_path: Path) -> None:
    """Fork in a separate process, so that no thread of the test runner is forked."""
    path = make_store(tmp_path / "store")
    script = """
import os, sys
from pathlib import Path
from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
store = Store.open(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    code = 0
    for use in (store.revision, lambda: Store.open(Path(sys.argv[1]))):
        try:
            use()
        except KvtoolError as error:
            code += "fork" in error.message
    store.close()
    os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
store.revision()
store.close()
sys.exit(code)
"""
    run = subprocess.run([sys.executable, "-c", script, path], env=_environment(), capture_output=True, check=False)
    assert run.returncode == 2, run.stderr.decode()


def test_closed(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.close()
    store.close()
    with refused(KvtoolError):
        store.revision()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with refused(UsageError):
        Store.create_or_open(tmp_path / os.fsdecode(b"st\xff"))
    assert list(tmp_path.iterdir()) == []
