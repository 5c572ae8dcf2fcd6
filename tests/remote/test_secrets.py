"""A password in a store's URL is shown nowhere and stored nowhere, in every form of the URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtool.core.common.urls import for_people, scrubbed
from kvtool.core.errors import RemoteError
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.mirror import local_place
from tests.cli.working import QUESTION, SHORT, Done, kvtool
from tests.remote.serving import RedisServer, free_port

SECRET = re.compile("zqxwv[a-h]", re.I)  # the parts of every password here
WRONG = [
    "redis://zqxwva/zqxwvb@HERE/0",
    "redis://:zqxwva/zqxwvb@HERE/0",
    "redis://:zqxwva@zqxwvb@HERE/0",
    "redis://:zqxwva?zqxwvb@HERE/0",
    "redis://:zqxwva#zqxwvb@HERE/0",
    "redis://:zqxwva:zqxwvb@HERE/0",
    "redis://:[zqxwva@HERE/0",
    "redis://:zq a zqxwvb@HERE/0",
    "redis://user:zqxwva",
    "redis://user:zqxwva/0",
    "redis://:70000/zqxwvb",
    "redis://HERE/zqxwvb",
    "redis://HERE/0#zqxwvb",
    "redis://HERE/0?zqxwvb",
    "redis://HERE/0?db=zqxwva@zqxwvb",
    "redis:/:zqxwva@HERE/0",
    "redis:user:zqxwva@HERE/0",
    "user:zqxwva@redis://HERE/0",
    "http://user:zqxwva@HERE/0",
    "s3://zqxwva:zqxwvb@bucket/path",
    "file://user:zqxwva@host/folder",
    "file:zqxwva@host",
]
RIGHT = [
    "redis://user:zqxwva@HERE/0",
    "redis://:zqxwva%2Fzqxwvb%40zqxwvc@HERE/0?prefix=x",
    "rediss://zqxwva@HERE/0",
    "redis://HERE/0?password=zqxwva",
    "redis://HERE/0?unknown=zqxwva",
]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


EVERY_COMMAND = (
    *("inspect --store URL", "inspect plan Who? --store URL", "inspect chunk 00 --store URL", "compress --store URL"),
    *("bench store --store URL", "store stats --store URL", "store ls --store URL", "store verify --store URL"),
    *("store rm x --store URL", "no-such-command --store URL", "query --no-such-flag --store URL"),
    *("ingest corpus --store URL", "store pull URL --store corpus/store"),
)
SOME_COMMANDS = (
    *("config show --store URL", "query Who? --store URL", "store push URL", "store ls URL"),
    *("config show --stoer=URL", "config show --fusion URL", "config show --lock-wait URL"),
)


def run(command: str, url: str, *more: str) -> Done:
    return kvtool(*(word.replace("URL", url) for word in command.split()), *more)


@pytest.fixture
def looked_at(tmp_path: Path) -> Iterator[list[Done]]:
    said: list[Done] = []
    yield said
    for done in said:
        assert not SECRET.search(done.out + done.err), (done.out, done.err)
        assert "bug in kvtool" not in done.err, done.err
    for path in tmp_path.rglob("*"):
        assert not SECRET.search(path.name)
        if path.is_file() and path.name != "kvtool.toml":
            assert not re.search(SECRET.pattern.encode(), path.read_bytes(), re.I), path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_DEBUG", "1")  # tracebacks with all that led to them
    work = tmp_path / "work"
    (work / "corpus").mkdir(parents=True)
    (work / "corpus/a.md").write_text("A text.")
    monkeypatch.chdir(work)
    return work


@pytest.mark.parametrize("url", [*WRONG, *RIGHT])
def test_errors_hide_it(
    url: str, port: int, looked_at: list[Done], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url.replace("HERE", f"127.0.0.1:{port}")
    looked_at += [run(command, url, *more) for command in SOME_COMMANDS for more in ((), ("--json",))]
    monkeypatch.setenv("KVTOOL_STORE", url)
    looked_at += [kvtool("config", "show", "--json"), kvtool("config", "show"), kvtool("query", "Who?")]
    monkeypatch.delenv("KVTOOL_STORE")
    for line in (f"store = '{url}'", f"store = ['{url}']", f"store = '{url}", f"'{url}'=1"):
        (work / "kvtool.toml").write_text(line)
        looked_at += [kvtool("config", "show", "--json"), kvtool("query", "Who?")]


@pytest.mark.parametrize("url", [WRONG[0], "redis:/:zqxwva@HERE/0", RIGHT[0]])
def test_no_command_shows_it(url: str, port: int, looked_at: list[Done], work: Path) -> None:
    for command in EVERY_COMMAND:
        looked_at.append(run(command, url.replace("HERE", f"127.0.0.1:{port}")))
        assert looked_at[-1].code


def test_stores_hide_it(store: Path, looked_at: list[Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_DEBUG", "1")
    monkeypatch.setenv("KVTOOL_TIMELINE", str(tmp_path / "trace.json"))
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", "--requirepass", "zqxwva/zqxwvb@")
    try:
        url = server.url.replace("://", "://:zqxwva%2Fzqxwvb%40@")
        for place in (url, server.url + "?password=zqxwva%2Fzqxwvb%40"):
            looked_at += [
                kvtool("store", "push", place, "--store", store, "--json").fine(),
                kvtool("query", QUESTION, "--store", place, *SHORT).fine(),
                kvtool("query", QUESTION, "--store", place, "--json", "--explain", *SHORT).fine(),
                kvtool("inspect", "--store", place, "--json"),
                kvtool("store", "pull", place, "--store", store, "--jsonl", "-v").fine(),
                kvtool("store", "push", place, "--store", store, "--verify", "--delete", "-v").fine(),
            ]
            assert local_place(place).exists()
        assert local_place(url) == local_place(url.replace("zqxwvb", "zqxwvc"))
        looked_at.append(kvtool("store", "push", url.replace("zqxwvb", "zqxwvc"), "--store", store))
        assert looked_at[-1].code == 1
    finally:
        server.kill()
    looked_at.append(kvtool("query", QUESTION, "--store", url, *SHORT))  # it is gone
    assert "***@127.0.0.1" in looked_at[-1].err


def test_what_a_server_repeats_of_a_password_is_not_passed_on(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis import Connection
    from redis.exceptions import ResponseError

    def quotes(self: Connection, *args: object, **more: object) -> None:
        raise ResponseError("unknown command 'AUTH', with args beginning with: 'zqxwva/zqxwvb'")

    monkeypatch.setattr(Connection, "on_connect", quotes)
    monkeypatch.setattr(Connection, "on_connect_check_health", quotes)
    with (
        closing(open_blobs(redis_url.replace("://", "://:zqxwva%2Fzqxwvb@"))) as blobs,
        pytest.raises(RemoteError) as caught,
    ):
        blobs.get(["x"])
    assert "unknown command" in caught.value.message
    error: BaseException | None = caught.value
    while error is not None:
        assert not SECRET.search(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0?prefix=a", "redis://host:6379/0?prefix=a"),
        ("redis://user:secret@host/2", "redis://***@host/2"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://***@host/2", "redis://***@host/2"),
        ("redis://host:70000/x?a=b&c", "redis://***/***?a=***&***"),
        ("redis://:secr/et@host/2", "redis://***"),
        ("file:///mnt/a@b/kv", "file:///mnt/a@b/kv"),
        ("/mnt/kv", "/mnt/kv"),
    ],
)
def test_a_url_for_people(url: str, shown: str) -> None:
    assert for_people(url) == shown
    assert for_people(shown) == shown
    assert scrubbed(f"`{url}`: gone") == f"`{shown}`: gone"


def test_what_signs_an_address_is_shown_nowhere(work: Path, looked_at: list[Done]) -> None:
    """Check it also where the address of a container or an object is given in place of a file or a cluster."""
    for url in (
        "https://HERE/kv?sv=2020&sig=zqxwva%3D",
        "https://HERE/kv?X-Amz-Credential=zqxwva&X-Amz-Signature=zqxwvb",
    ):
        url = url.replace("HERE", "127.0.0.1:9")
        for words in (("store", "import", url), ("ingest", "corpus", "--ray", url)):
            looked_at.append(kvtool(*words, "--store", "new", "--json"))
            assert looked_at[-1].code
    assert scrubbed("https://host/kv?sv=2&sig=a%3D: no") == "https://host/kv?sv=2&sig=***: no"


def test_the_hint_that_shows_a_url_stays_whole() -> None:
    """Check that the `@` of a password, of which the hint speaks, is not taken for one."""
    done = kvtool("store", "push", "redis:nonsense")
    assert done.code == 2
    assert "hint: in a password write / @ ? # as %2F %40 %3F %23; such as redis://host:6379/0 or file:///" in done.err


def test_folders_with_an_at_are_different_tiers() -> None:
    assert local_place("file:///mnt/a@x/kv") != local_place("file:///mnt/b@x/kv")
