"""Every backend, and a shared store on each: the columns of the table of faults (`faults.py`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.remote.object_stub import AzureServer, GoogleServer, WebServer
from tests.remote.serving import AMAZON, Link
from tests.remote.way import Way

Stop = Callable[[], object]
Server = Callable[[str], Any]  # one that is there for all tests: `pytest`'s `getfixturevalue`


@dataclass
class Site:
    """A place for a shared store.

    Attributes
    ----------
    url : by which it is read, through any link or proxy.
    home : by which it is written; the same but for a web server, of which nothing but reading is known.
    ask_at : lets it be reached through another port.
    way : a proxy that knows HTTP, before its server.
    pulled, asked : what comes in a pull of all, and in a question: bytes, or reads of a folder.
    """

    name: str
    url: str
    home: str
    port: int = 0
    ask_at: Callable[[Site, int], None] = lambda site, port: None
    folder: Path | None = None
    way: Way | None = None
    pulled: float = 0
    asked: float = 0

    @property
    def reading_port(self) -> int:
        return self.way.port if self.way is not None else self.port


class Backend(NamedTuple):
    """A column: `schemes` of `KINDS`, whose tests these are. Faults that are the same for a `kind` are said once."""

    schemes: tuple[str, ...]
    kind: str
    make: Callable[[Server, Path, pytest.MonkeyPatch, list[Stop]], Site]


def _folder(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    url = f"file://{folder}/shared"
    return Site("file", url, url, folder=folder / "shared")


def _redis(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    number = next(_NUMBERS)

    def ask_at(site: Site, port: int) -> None:
        site.url = site.home = f"redis://127.0.0.1:{port}/0?prefix=site-{number}"

    return _named(Site("redis", "", "", server("redis_server").port, ask_at))


def _s3(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    there = server("s3_server")
    for name, value in AMAZON.items():
        patch.setenv(name, value)
    url = there.folder()
    site = Site("s3", url, url, there.port)
    site.ask_at = lambda site, port: patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return _behind_a_way(site, stops)


def _google(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    there = GoogleServer()
    stops.append(there.close)

    def ask_at(site: Site, port: int) -> None:
        at = f"http://127.0.0.1:{port}"
        key = {"gcs_base_url": at, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        patch.setenv("GOOGLE_BASE_URL", at)

    return _behind_a_way(Site("gs", "gs://bucket/team/kv", "gs://bucket/team/kv", there.port, ask_at), stops)


def _azure(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    there = AzureServer()
    stops.append(there.close)
    patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    patch.setenv("AZURE_SKIP_SIGNATURE", "true")
    site = Site("az", "az://bucket/team/kv", "az://bucket/team/kv", there.port)
    site.ask_at = lambda site, port: patch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{port}")
    return _behind_a_way(site, stops)


def _web(server: Server, folder: Path, patch: pytest.MonkeyPatch, stops: list[Stop]) -> Site:
    there = WebServer(folder / "shared")
    stops.append(there.close)
    site = Site("web", "", f"file://{folder}/shared", there.port, _web_at, folder / "shared")
    return _behind_a_way(site, stops)


def _web_at(site: Site, port: int) -> None:
    site.url = f"http://127.0.0.1:{port}/kv"


def _behind_a_way(site: Site, stops: list[Stop]) -> Site:
    site.way = Way(site.port)
    stops.append(site.way.close)
    return _named(site)


def _named(site: Site) -> Site:
    site.ask_at(site, site.reading_port)
    return site


_NUMBERS = itertools.count()
BACKENDS: Mapping[str, Backend] = {
    "file": Backend(("file",), "file", _folder),
    "redis": Backend(("redis", "rediss"), "redis", _redis),
    "s3": Backend(("s3",), "http", _s3),
    "gs": Backend(("gs",), "http", _google),
    "az": Backend(("az",), "http", _azure),
    "web": Backend(("https", "http"), "http", _web),
}
READ_ONLY = {"web": "it can only be read"}  # the others are written, too
WRITABLE = [name for name in BACKENDS if name not in READ_ONLY]


@contextmanager
def _made(name: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    stops: list[Stop] = []
    given = request.getfixturevalue
    site = BACKENDS[name].make(given, given("tmp_path"), given("monkeypatch"), stops)
    site.ask_at(site, site.port)
    yield site
    for stop in stops:
        stop()


@pytest.fixture
def gs_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with _made("gs", request) as site:
        yield site.url


@pytest.fixture
def az_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with _made("az", request) as site:
        yield site.url


@pytest.fixture(params=["redis", "s3"])
def behind(request: pytest.FixtureRequest) -> Iterator[Link]:
    with _made(request.param, request) as site, closing(Link(site.port)) as link:
        site.ask_at(site, link.port)
        link.url, link.home = site.url, site.home
        yield link


FAR = [name for name in BACKENDS if name != "file"]  # whatever has a line that can be cut
