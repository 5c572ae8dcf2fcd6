"""Object stores: credentials, services that refuse or fail, lists that lag, web servers that only give."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError, RemoteError
from kvtool.core.remote import object_store
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.object_store import ObjectBlobs
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.cli.working import QUESTION, SHORT, kvtool
from tests.remote.object_stub import Answer, Serve, WebServer
from tests.spying import calls_of
from tests.stores import check_file, new_store
from tests.wording import refused

PATIENCE = 60.0  # seconds for a value: an imitated service on a busy machine takes longer than a real one
SECRETS = re.compile("zqxwv", re.I)  # of what `s3_url` puts into the environment


def test_credentials_of_a_profile(serve: Serve, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(lambda request: Answer(404))
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.url)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", service.url)  # of a machine's role
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = OFTHETEAM\naws_secret_access_key = secret\n")

    def who() -> str:
        service.asked.clear()
        with closing(open_blobs(s3_url, PATIENCE)) as blobs:
            assert blobs.get(["x"]) == [None]
        return re.search("Credential=([A-Z]+)/", service.asked[-1].headers["authorization"])[1]  # type: ignore[index]

    assert who() == "AKIAZQXWVA"
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert who() == "OFTHETEAM"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(KvtoolError):
        open_blobs(s3_url)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with closing(open_blobs(s3_url)) as blobs, pytest.raises(RemoteError) as caught:
        blobs.get(["x"])
    assert "credentials" in caught.value.hint
    assert service.asked[-1].path == "/latest/api/token"  # the machine's role was asked for


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket/kv", "az://container", "https://host/kv"])
def test_without_the_package(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtool.core.remote.object_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refused(KvtoolError):
        open_blobs(url)


def test_azure_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(RemoteError):
        open_blobs("az://container")


def test_s3_refuses_the_second_swap(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_blobs(s3_url)) as one, closing(open_blobs(s3_url)) as other:
        for before, after in ((None, b"1"), (b"1", b"2")):
            stale = other._value("head")  # type: ignore[attr-defined]
            assert one.compare_and_swap("head", before, after)
            with monkeypatch.context() as patch:
                patch.setattr(other, "_value", lambda name, stale=stale: stale)
                assert not other.compare_and_swap("head", before, b"other")
        assert one.get(["head"]) == [b"2"]


def test_leases_are_no_values(s3_url: str) -> None:
    with closing(open_blobs(s3_url, PATIENCE)) as blobs:
        blobs.put({"push/of-somebody": b"1"})
        for name in ("push-1", "sweep-2", "push-3"):
            blobs.hold(name)
        blobs.release("push-3")
        assert blobs.held() == {"push-1", "sweep-2"}
        assert list(blobs.names()) == []


def test_many_sizes_are_asked_for_in_lists(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MANY", 4)
    with closing(open_blobs(s3_url, PATIENCE)) as blobs:
        blobs.put({f"pack/{number}": bytes(number + 1) for number in range(6)} | {"head": b"1"})
        asked = calls_of(monkeypatch, ObjectBlobs, "_sizes", lambda self, names: [*names])
        names = [f"pack/{number}" for number in range(7)]
        assert blobs.sizes([*names, "head"]) == [1, 2, 3, 4, 5, 6, 0, 1]
    assert asked == [["pack/6", "head"]]


def test_credentials_are_shown_and_written_nowhere(s3_url: str, store: Path, tmp_path: Path) -> None:
    done = [
        kvtool("store", "push", s3_url, "--store", store, "-v", "--json").fine(),
        kvtool("query", QUESTION, "--store", s3_url, "--json", "--explain", *SHORT).fine(),
        kvtool("store", "pull", s3_url, "--store", tmp_path / "pulled", "-v").fine(),
        kvtool("store", "push", s3_url.replace("bucket", "none"), "--store", store).failed(1),
        kvtool("query", QUESTION, "--store", s3_url.replace("team", "none"), *SHORT).failed(10),
    ]
    assert s3_url in done[0].out + done[0].err
    assert not any(SECRETS.search(one.out + one.err) for one in done)
    for path in tmp_path.rglob("*"):
        assert not (path.is_file() and re.search(SECRETS.pattern.encode(), path.read_bytes(), re.I)), path


# ---- a web server ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    with (
        Store.open(new_store(tmp_path / "store")) as store,
        closing(open_blobs(f"file://{tmp_path / 'shared'}")) as blobs,
    ):
        push(store, blobs)
    return tmp_path / "shared"


def test_a_web_server_is_read(shared: Path, tmp_path: Path) -> None:
    with closing(WebServer(shared)) as service, closing(open_blobs(f"{service.url}/kv")) as blobs:
        assert pull(tmp_path / "pulled", blobs).damaged == []
        with Store.open(tmp_path / "pulled") as store:
            for file in ("f0", "f1", "f2"):
                check_file(store, file)
            assert {request.method for request in service.asked} == {"GET"}
            packs = [request for request in service.asked if "/pack/" in request.path]
            assert len(packs) <= 2 + 2  # the KV of six chunks of two layers each; what describes chunks, and files
            with pytest.raises(RemoteError):
                push(store, blobs)
    assert all(request.path.startswith("/kv/") for request in service.asked)
