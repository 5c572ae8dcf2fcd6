"""`kvtool query` with a running server of its store: the same answer, by a process that loads no model."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.cli import query
from kvtool.serve import app, unix_socket
from kvtool.serve.unix_socket import connect, leave, listen, socket_path
from tests.cli.working import QUESTION, SHORT, environment, kvtool
from tests.serve.conftest import Served, of_shell, serving, turned, wait_until
from tests.wording import refused

IMPORTED = """
import sys
from kvtool.cli.app import main
code = main(sys.argv[1:])
print(len(sys.modules), [name for name in %s if name in sys.modules], file=sys.stderr)
"""
# None of them takes part in asking a server, and each takes long to import.
UNUSED = ("torch", "transformers", "numpy", "starlette", "pydantic", "lmdb", "kvtool.core.corpus.readers")
MOST_MODULES = 320  # 280 when this was written


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The questions that this process has answered."""
    answered, opened = list[bool](), query.open_any_store
    monkeypatch.setattr(query, "open_any_store", lambda run: answered.append(True) or opened(run))
    return answered


def test_the_server_answers_with_all_options(served: Served, ready: Path, here: list[bool]) -> None:
    asked = ("query", QUESTION, "--store", ready)
    said = kvtool(*asked, *SHORT).fine()
    assert "union: first token after" in said.err
    assert "mill2.md:1" in said.err
    row = kvtool(*asked, *SHORT, "--fusion", "epic", "--link-tokens", "3", "--top-k", "2", "--json").fine().json
    assert (row["fusion"], len(row["chunks"]), row["tokens"]["recomputed"]) == ("epic", 2, 6)
    auto = kvtool(*asked, *SHORT, "--fusion", "auto", "-v").fine()
    assert "auto: " in auto.err
    rounds = kvtool(*asked, *SHORT, "--defer", "--set", "defer.first=1").fine()
    assert "round 1: 1 chunk" in rounds.err
    kvtool("query", "zzyzx", "--store", ready).failed(1, "no chunk matches")
    kvtool(*asked, "--documents", "nowhere.txt", "--json").failed(2, "nowhere.txt")
    assert not here


def test_the_log_has_the_questions_of_a_shell(store: Path) -> None:
    asked = ("query", "--store", store, *SHORT, "--json")
    with serving(store) as served:
        found = kvtool(*asked, QUESTION).fine().json
        kvtool(*asked, "zzyzx").failed(1, "no chunk matches")
        kvtool(*asked, QUESTION, "--dtype", "bfloat16")  # the server declines
        row, failed, declined = served.logged(3)
    assert (row["type"], row["client"], row["path"], row["status"]) == ("request", "shell", unix_socket.PATH, 200)
    chunks = [chunk["id"] for chunk in found["chunks"]]
    assert (row["chunks"], row["hits"], row["tokens"]) == (chunks, len(chunks), found["tokens"])
    assert QUESTION not in str(served.log)
    assert (failed["status"], declined["status"]) == (404, 409)
    assert "no chunk matches" in failed["error"]


def test_a_shell_that_leaves_is_noted(store: Path) -> None:
    with serving(store) as served, turned(served) as permits:
        connected = connect(socket_path(store))
        assert connected is not None
        data = json.dumps(of_shell()).encode()
        head = f"POST {unix_socket.PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connected.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: served.engine.scheduler.waiting == 1)
        connected.close()
        (row,) = served.logged(1)
        permits.release(10)
        wait_until(lambda: served.engine.scheduler.waiting == 0)
    assert (row["status"], row["client"]) == (499, "shell")
    assert served.warnings == []


def test_the_shell_imports_no_model(served: Served, ready: Path) -> None:
    command = [sys.executable, "-c", IMPORTED % repr(UNUSED), "query", QUESTION, "--store", str(ready), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=True)
    count, _, unused = done.stderr.splitlines()[-1].partition(" ")
    assert (int(count) < MOST_MODULES, unused) == (True, "[]"), done.stderr
    assert done.stdout.strip()


def test_what_only_the_asking_process_shows(
    served: Served, ready: Path, here: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("query", QUESTION, "--store", ready, *SHORT)
    for alone in (["--explain"], ["--compare", "epic"], ["--dtype", "bfloat16"]):
        kvtool(*asked, *alone)
        assert here.pop()
    assert not here
    monkeypatch.setenv("KVTOOL_SERVER", "no")
    kvtool(*asked)
    assert here


def test_folders_of_models_are_those_of_the_shell(
    store: Path, static_model: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (here / "vectors").symlink_to(static_model)
    (here / "network").symlink_to(tiny)
    asked: list[str | None] = []
    ask = app.ShellQuestion.ask
    monkeypatch.setattr(app.ShellQuestion, "ask", lambda self: asked.append(self.options["embedder"]) or ask(self))
    monkeypatch.setattr(app, "os", SimpleNamespace(path=os.path, getcwd=lambda: str(there)))
    with serving(store):
        monkeypatch.chdir(here)
        base = ("query", QUESTION, "--store", store, *SHORT)
        for name in ("vectors", "./vectors", str(static_model)):
            monkeypatch.setenv("KVTOOL_EMBEDDER", name)
            kvtool(*base).fine()
        assert asked == [str(here / "vectors")] * 2 + [str(static_model)]
        monkeypatch.setenv("KVTOOL_EMBEDDER", "./nowhere")
        kvtool(*base).failed(12, "there is no embedding model")
        assert len(asked) == 3
        monkeypatch.delenv("KVTOOL_EMBEDDER")
        kvtool(*base, "--model", "./network").fine()  # without the server, which was given no name
        assert len(asked) == 3


def test_the_socket_is_its_users_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path(store)
    with serving(store):
        assert path == store.with_name("store.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert listen(path) is None  # of a second server
        link = store.with_name("link")
        link.symlink_to(store)
        assert socket_path(link) == path
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        assert connect(path) is None  # somebody else's
        monkeypatch.undo()
    assert not path.exists()


def test_what_a_killed_server_left_is_replaced(store: Path) -> None:
    path = socket_path(store)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    assert connect(path) is None
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()
    with serving(store):
        made = connect(path)
        assert made is not None
        made.close()


def test_a_file_in_its_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    path.write_text("mine")
    with pytest.raises(OSError):
        listen(path)
    leave(path)
    assert path.read_text() == "mine"
    assert connect(path) is None


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="only Linux reaches a socket by its folder's descriptor")
def test_a_path_longer_than_a_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("long " * 30)
    folder.mkdir()
    path = folder / "store.sock"
    bound = listen(path)
    assert bound is not None
    with bound:
        made = connect(path)
        assert made is not None
        made.close()
    leave(path)
    assert not path.exists()


def test_names_of_files_are_read_where_the_shell_stands(
    served: Served, ready: Path, here: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's working folder is another one, where the same name may be another file's."""
    asked = ("query", QUESTION, "--store", ready, *SHORT)
    source = kvtool(*asked, "--documents", "mill2.md", "--json").fine().json["chunks"][0]["source"]
    assert not here
    monkeypatch.setattr(app, "os", SimpleNamespace(path=os.path, getcwd=lambda: "/elsewhere"))
    kvtool(*asked).fine()
    kvtool(*asked, "--documents", source).fine()
    assert not here
    for relative in (["--documents", "mill2.md"], ["--chunks", "mill2.md:1"]):
        kvtool(*asked, *relative).fine()
        assert here.pop()


def test_options_that_the_server_does_not_know(served: Served, ready: Path) -> None:
    for options in ({"from_the_future": 1}, {"fusion": "of a plugin"}):
        connected = connect(socket_path(ready))
        assert connected is not None
        asked = of_shell(**options)
        with refused(unix_socket.Declined, numbers=True):
            list(unix_socket.ask(connected, asked))
    assert served.warnings == []


def test_a_server_that_was_stopped(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket, "_READ_TIMEOUT", 0.01)
    bound = listen(socket_path(store))
    assert bound is not None
    with bound:
        assert kvtool("query", QUESTION, "--store", store, *SHORT, "--json").fine().json["chunks"]
    leave(socket_path(store))


@contextmanager
def answering(store: Path, data: bytes) -> Iterator[None]:
    """Listen at a store's socket like a server that is not ours, and answer with these bytes."""
    bound = listen(socket_path(store))
    assert bound is not None

    def answer() -> None:
        made, _ = bound.accept()
        with made:
            made.sendall(data)
            made.shutdown(socket.SHUT_WR)
            while made.recv(65536):
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    with bound:
        yield
        thread.join()
    leave(socket_path(store))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish\r\n\r\n",
        b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n",
        HEAD,
        HEAD + b"{}\n",
        HEAD + b"no JSON\n",
    ],
    ids=["nothing", "rubbish", "busy", "no line", "no answer", "no json"],
)
def test_a_server_that_does_not_answer_is_done_without(store: Path, data: bytes) -> None:
    asked = ("query", QUESTION, "--store", store, *SHORT, "--json")
    with answering(store, data):
        done = kvtool(*asked).fine()
    assert done.json["chunks"]


def test_a_server_that_ends_within_an_answer(store: Path) -> None:
    piece = json.dumps({"text": "The mill"}).encode() + b"\n"
    with answering(store, HEAD + piece):
        done = kvtool("query", QUESTION, "--store", store)
    assert done.code == 1
    assert done.out.startswith("The mill")
    assert "within the answer" in done.err
