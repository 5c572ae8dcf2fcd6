"""A server of a small store in this process, clients that ask it, and questions to its engine."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kvtool
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.serve.anthropic import MessagesBody
from kvtool.serve.app import local_app, make_app
from kvtool.serve.auth import owners_of
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event
from kvtool.serve.openai import ChatBody
from kvtool.serve.options import ServeOptions
from kvtool.serve.server import Listener, server_of
from kvtool.serve.unix_socket import leave, listen, socket_path
from tests.cli.working import QUESTION
from tests.retrieval.conftest import static_model

__all__ = ["static_model"]
KEY = "kv-of-these-tests"
PATIENCE = 120.0  # seconds, on a busy machine


@dataclass
class Served:
    url: str
    engine: Engine
    log: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE)

    def connect(self) -> socket.socket:
        host, _, port = self.url.partition("://")[2].partition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def logged(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.log) >= count)
        return self.log


def wait_until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def serving(
    store: Path,
    key: str | None = KEY,
    asking: QueryOptions | None = None,
    model: str | None = None,
    kept: int | None = None,
    **options: Any,
) -> Iterator[Served]:
    """`key`: one or several, one a line. `kept`: bytes that the system may hold of what a client does not read."""
    wanted = ServeOptions(key=key is not None, **options)
    warnings: list[str] = []

    def warn(text: str, hint: str) -> None:
        warnings.append(text)

    keys = None if key is None else key.splitlines()
    engine = Engine(store, ModelOptions(model=model), warn, wanted, owners_of(keys))
    bound = socket.create_server(("127.0.0.1", 0))
    if kept is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kept)
    beside = listen(socket_path(store))
    served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", engine, warnings=warnings)
    ingesting = IngestOptions(model=model, chunk_tokens=64, lead_in="prefix") if model else IngestOptions()
    app = make_app(engine, wanted, asking or QueryOptions(max_tokens=8), ingesting, keys, served.log.append)
    reached = [Listener(app, bound, timeout=wanted.client_timeout)] + (
        [Listener(local_app(engine, served.log.append), beside)] if beside is not None else []
    )
    servers = [server_of(each, drain=1) for each in reached]
    threads = [
        threading.Thread(target=server.run, args=([listener.socket],))
        for server, listener in zip(servers, reached, strict=True)
    ]
    engine.start()
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(server.started for server in servers))
        yield served
    finally:
        for server in servers:
            server.should_exit = True
        for thread in threads:
            thread.join()
        if beside is not None:
            leave(socket_path(store))
        engine.close()


@contextmanager
def turned(served: Any) -> Iterator[threading.Semaphore]:
    """Let each turn of an engine, `served.engine`, take a permit."""
    permits, scheduler = threading.Semaphore(0), served.engine.scheduler
    turn = scheduler._turn

    def wait() -> None:
        permits.acquire()
        turn()

    scheduler._turn = wait  # type: ignore[method-assign]
    try:
        yield permits
    finally:
        permits.release(10**6)


def of_shell(**options: Any) -> dict[str, Any]:
    """A question as a shell sends it by the socket."""
    asked = {"question": QUESTION, "chunks": [], "documents": [], "options": options, "model": vars(ModelOptions())}
    return asked | {"folder": os.getcwd()}


@pytest.fixture(scope="session")
def ready(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(built / "store", tmp_path_factory.mktemp("ready") / "store"))


@pytest.fixture
def store(ready: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ready, tmp_path / "store"))


@pytest.fixture
def comets(tiny: Path, tmp_path: Path) -> Path:
    """Another store of the same model."""
    (tmp_path / "other.md").write_text("# Comet\n\nThe comet was seen by Ada.")
    with kvtool.open(tmp_path / "other", model=str(tiny)) as cache:
        cache.ingest(tmp_path / "other.md", lead_in="prefix", chunk_tokens=64)
    return tmp_path / "other"


@pytest.fixture(scope="module")
def served(ready: Path) -> Iterator[Served]:
    with serving(ready) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx2.Client]:
    with served.client as client:
        yield client


def stream(engine: Engine, question: Ask) -> Iterator[str | Answer]:
    """Yield the pieces of an answer, at last the complete one. Closing the iterator abandons the answer."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    job = engine.submit(question, events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, KvtoolError):
                raise event
            yield event
            if isinstance(event, Answer):
                return
    finally:
        engine.scheduler.leave(job)


def ask(engine: Engine, question: Ask) -> Answer:
    *_, answer = stream(engine, question)
    assert isinstance(answer, Answer)
    return answer


def ask_of_chat(body: dict[str, Any], options: QueryOptions | None = None) -> Ask:
    """The question of a body of `/v1/chat/completions`."""
    return ChatBody.read_chat(body).ask(options or QueryOptions(), False)


def ask_of_message(body: dict[str, Any]) -> Ask:
    """The question of a body of `/v1/messages`."""
    return MessagesBody.read_chat(body).ask(QueryOptions(), False)
