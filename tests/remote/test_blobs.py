"""The protocol of a shared store, on every backend."""

from __future__ import annotations

import itertools
import os
import socket
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from redis import Redis
from redis.connection import Connection

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.errors import KvtoolError, RemoteError, UsageError
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.prefetch import GAP, Prefetcher
from tests.remote.serving import Link
from tests.spying import calls_of

BIG = bytes(range(256)) * 4096


def whole(*names: str, most: int = len(BIG)) -> list[BlobRequest]:
    return [BlobRequest(name, most) for name in names]


def fetch(blobs: Blobs, wanted: list[BlobRequest]) -> list[bytes | None]:
    with closing(Prefetcher(blobs)) as arrivals:
        arrivals.ask(wanted)
        return [arrivals.take(10).value for _ in wanted]


def test_values_by_name(url: str) -> None:
    with closing(open_blobs(url)) as blobs:
        assert blobs.get(["a/b", "a"]) == [None, None]
        blobs.put({"a/b": b"1", "a/c/d-1": BIG, "other": b"2"})
        blobs.flush()
        assert blobs.get(["a/c/d-1", "nothing", "a/b", "other"]) == [BIG, None, b"1", b"2"]
        assert blobs.sizes(["a/b", "a", "a/c/d-1", "other"]) == [1, 0, len(BIG), 1]
        assert sorted(blobs.names()) == ["a/b", "a/c/d-1", "other"]
        assert sorted(blobs.names("a/c")) == ["a/c/d-1"]
        blobs.delete(["a/b", "nothing"])
        assert sorted(blobs.names()) == ["a/c/d-1", "other"]
    with closing(open_blobs(url)) as again:
        assert again.get(["a/c/d-1"]) == [BIG]


def test_path_in_place_of_a_url_names_its_url(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        open_blobs(str(tmp_path / "한글 %"))
    (url,) = [word.rstrip(";") for word in found.value.hint.split() if word.startswith("file:")]
    with closing(open_blobs(url)) as blobs:
        blobs.put({"a": b"1"})
    assert (tmp_path / "한글 %" / "a").read_bytes() == b"1"
    with pytest.raises(UsageError) as found:
        open_blobs("user:secret@host")
    assert "secret" not in found.value.message + found.value.hint


def test_compare_and_swap_refuses_a_stale_head(url: str) -> None:
    with closing(open_blobs(url)) as one, closing(open_blobs(url)) as other:
        assert one.compare_and_swap("head", None, b"1")
        assert not other.compare_and_swap("head", None, b"2")
        assert other.compare_and_swap("head", b"1", b"2")
        assert not one.compare_and_swap("head", b"1", b"3")
        assert one.get(["head"]) == [b"2"]


def test_prefetched_values_come_in_order(url: str) -> None:
    with closing(open_blobs(url)) as blobs:
        blobs.put({f"v/{number}": bytes([number]) * 1000 for number in range(50)})
        arrivals = Prefetcher(blobs)
        arrivals.ask(whole(*(f"v/{number}" for number in range(30))))
        first = [arrivals.take(5) for _ in range(10)]
        arrivals.ask(whole("none", "v/49"))
        rest = [arrivals.take(5) for _ in range(22)]
        arrivals.close()
    assert [one.value for one in first + rest] == [*(bytes([n]) * 1000 for n in range(30)), None, bytes([49]) * 1000]
    assert [one.name for one in rest[-2:]] == ["none", "v/49"]
    assert all(one.at <= other.at for one, other in itertools.pairwise(first))


def test_parts_of_a_pack(url: str) -> None:
    with closing(open_blobs(url)) as blobs:
        blobs.put({"pack/a": BIG, "pack/b": b"0123456789"})
        ranges = [("a", 500, 1000), ("a", 1500, 10), ("b", 3, 4), ("a", 0, 600), ("a", len(BIG) - 5, 5), ("b", 9, 1)]
        parts = [BlobRequest("kv", size, f"pack/{name}", start) for name, start, size in ranges]
        parts += [BlobRequest("kv", 5, "pack/c", 0), BlobRequest("kv", 5, "pack/b", 7), BlobRequest("x", 5)]
        found = fetch(blobs, [*parts, *whole("pack/b")])
    values = {"a": BIG, "b": b"0123456789"}
    assert found[: len(ranges)] == [values[name][start : start + size] for name, start, size in ranges]
    assert found[len(ranges) :] == [None, b"789", None, b"0123456789"]


def test_redis_answers_queued_requests_together(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_blobs(redis_url)) as blobs:
        blobs.put({f"v/{number}": bytes([number]) * 1000 for number in range(200)} | {"pack/a": BIG})
        parts = [BlobRequest("kv", 100, "pack/a", number * 2 * GAP) for number in range(8)]
        single = whole(*(f"v/{number}" for number in range(200)), most=1000)
        sent = calls_of(monkeypatch, Connection, "send_packed_command", lambda own, commands, **more: commands)
        assert fetch(blobs, [*single, *parts]) == [
            *(bytes([number]) * 1000 for number in range(200)),
            *(BIG[part.start : part.start + 100] for part in parts),
        ]
    assert sum(bytes(piece).count(b"GETRANGE") for commands in sent for piece in commands) == 208
    assert len([commands for commands in sent if b"GETRANGE" in b"".join(commands)]) == 4  # of 64 requests at most


def test_redis_key_of_another_type_is_damaged(redis_url: str) -> None:
    with closing(open_blobs(redis_url)) as blobs, closing(Redis.from_url(redis_url)) as client:
        blobs.put({"v/a": b"1", "v/c": b"3"})
        client.lpush("kvtool/v/b", "2")
        assert blobs.get(["v/a", "v/b", "v/c"]) == [b"1", b"", b"3"]


def test_redis_prefix_separates_stores(redis_url: str) -> None:
    with closing(open_blobs(redis_url)) as one, closing(open_blobs(f"{redis_url}?prefix=a[b]*")) as other:
        one.put({"x": b"1"})
        other.put({"x": b"2", "y": b"3"})
        assert one.get(["x", "y"]) == [b"1", None]
        assert sorted(other.names()) == ["x", "y"]
        assert list(one.names()) == ["x"]
        assert other.url == f"{redis_url}?prefix=a[b]*"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "s3://",
        "s3://bucket/a//b",
        "gs://bucket/../other",
        "az://key:secret@container",
        "https://host/kv?signature=1",
        "file://host/folder",
        "file://relative",
        "file:///mnt/kv%00",
        "file:///mnt/kv#2",
        "file:///mnt/kv?prefix=2",
        "redis://host/other",
        "redis://host/0/1",
        "redis://host/0?prefix=",
        "redis://host:port/0",
        "redis:/host/0",
        "/mnt/shared",
        "redis://host/0?unknown=1",
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_blobs(url).get(["x"])


@pytest.mark.parametrize("name", ["100% a#b?c", "가게", "\udcff\udcfe"])
def test_folders_of_any_name(name: str, tmp_path: Path) -> None:
    """Check that the shown name of such a folder names it again, and that none is taken for another."""
    with closing(open_blobs(f"file://{tmp_path}/{quote(name, errors='surrogateescape')}")) as blobs:
        blobs.put({"x": b"1"})
        assert [path.name for path in tmp_path.iterdir()] == [name]
        with closing(open_blobs(blobs.url)) as again:
            assert again.get(["x"]) == [b"1"]


def test_prefetch_times_out_and_continues(behind: Link) -> None:
    with closing(open_blobs(behind.url)) as blobs:
        blobs.put({"x": BIG})
        behind.rate = 0
        arrivals = Prefetcher(blobs)
        arrivals.ask(whole("x"))
        with pytest.raises(RemoteError):
            arrivals.take(0.1)
        assert arrivals.alive
        behind.rate = 1e12
        assert arrivals.take(10).value == BIG
        behind.close()
        arrivals.ask(whole("x"))
        with pytest.raises(RemoteError):
            arrivals.take(10)
        assert not arrivals.alive
        arrivals.close()


def test_push_to_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with closing(open_blobs(f"file://{tmp_path}/file/shared")) as blobs:
        assert blobs.get(["x"]) == [None]
        with pytest.raises(RemoteError):
            blobs.put({"x": b"1"})
        with pytest.raises(KvtoolError):
            blobs.compare_and_swap("head", None, b"1")


def in_the_way(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may not be long
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "socket", "folder", "huge"])
def test_special_files_are_never_read(tmp_path: Path, kind: str) -> None:
    with closing(open_blobs(f"file://{tmp_path}")) as blobs:
        for name in ("head", "kv/a/b/0", "meta/c"):
            in_the_way(tmp_path / name, kind)
            assert blobs.get([name]) == [b""]
            assert fetch(blobs, whole(name)) == [b""]


def test_value_larger_than_stated_is_refused(url: str) -> None:
    with closing(open_blobs(url)) as blobs:
        blobs.put({"v/0": BIG, "v/1": b"1", "head": bytes(5000)})
        assert fetch(blobs, whole("v/0", "v/1", "v/2", most=len(BIG) - 1)) == [b"", b"1", None]
        assert fetch(blobs, whole("v/0")) == [BIG]
        assert blobs.get(["head"]) == [b""]


def test_prefetch_is_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.remote.prefetch._MOST_UNTAKEN", 2 * len(BIG))
    with closing(open_blobs(url)) as blobs:
        blobs.put({f"v/{number}": BIG for number in range(10)})
        arrivals = Prefetcher(blobs)
        arrivals.ask(whole(*(f"v/{number}" for number in range(10))))
        deadline = time.monotonic() + 30
        while arrivals._untaken < 2 * len(BIG) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert arrivals._untaken < (2 + len(arrivals._threads)) * len(BIG)
        assert [arrivals.take(5).value for _ in range(10)] == [BIG] * 10
        arrivals.ask(whole(*(f"v/{number}" for number in range(10))))
        arrivals.close()
        for thread in arrivals._threads:
            thread.join(5)
            assert not thread.is_alive()
