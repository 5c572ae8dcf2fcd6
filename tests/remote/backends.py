"""Every backend, and a shared store on each: the columns of the table of faults (`faults.py`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtool.core.remote.blobs import Blobs, open_blobs
from tests.remote.object_stub import AzureServer, GoogleServer, WebServer
from tests.remote.serving import AMAZON, Link

Server = Callable[[str], Any]  # one that is there for all tests: `pytest`'s `getfixturevalue`


@dataclass
class Site:
    """A place for a shared store.

    Attributes
    ----------
    at : lets it be reached through a port, and returns the URL by which it is read then.
    folder : where its values are files, or None.
    way : the proxy (`Way`) before a server of HTTP whose answers are to fail.
    pulled, asked : what comes in a pull of all, and in a question: bytes, or reads of a folder.
    """

    at: Callable[[int], str]
    port: int = 0
    folder: Any = None
    way: Any = None
    pulled: float = 0
    asked: float = 0
    url: str = ""

    def reach(self, port: int = 0) -> None:
        self.url = self.at(port or (self.way.port if self.way is not None else self.port))

    @property
    def home(self) -> str:
        """Return the URL by which it is written: of a web server nothing but reading is known."""
        return f"file://{self.folder}" if self.folder is not None else self.url


class Scene:
    """A shared store that a fault happens to. `middle`: bytes through the link, or reads of the folder, until half of
    all has come."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.link: Any = Link(site.way.port if site.way is not None else site.port) if site.port else None
        if self.link is not None:
            site.reach(self.link.port)
        self.middle = 0.0
        self.patch, self.later = pytest.MonkeyPatch(), ExitStack()

    @contextmanager
    def made(self, make: Callable[[Scene], object], middle: float) -> Iterator[None]:
        self.middle = middle
        try:
            make(self)
            yield
        finally:
            self.patch.undo()
            self.later.close()

    def blobs(self, patience: float = 30.0) -> Blobs:
        return open_blobs(self.site.url, patience)

    @contextmanager
    def behind(self) -> Iterator[Blobs]:
        with closing(open_blobs(self.site.home)) as blobs:
            yield blobs

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.site.reach()


def _folder(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    return Site(lambda port: f"file://{folder}/shared", folder=folder / "shared")


def _redis(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    prefix = f"site-{next(_NUMBERS)}"
    return Site(lambda port: f"redis://127.0.0.1:{port}/0?prefix={prefix}", server("redis_server").port)


def _s3(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    there = server("s3_server")
    url = there.folder()
    for name, value in AMAZON.items():
        patch.setenv(name, value)

    def at(port: int) -> str:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        return str(url)

    return Site(at, there.port)


def _google(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    def at(port: int) -> str:
        base = f"http://127.0.0.1:{port}"
        key = {"gcs_base_url": base, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        patch.setenv("GOOGLE_BASE_URL", base)
        return "gs://bucket/team/kv"

    return Site(at, stack.enter_context(closing(GoogleServer())).port)


def _azure(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    patch.setenv("AZURE_SKIP_SIGNATURE", "true")

    def at(port: int) -> str:
        patch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{port}")
        return "az://bucket/team/kv"

    return Site(at, stack.enter_context(closing(AzureServer())).port)


def _web(server: Server, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> Site:
    there = stack.enter_context(closing(WebServer(folder / "shared")))
    return Site(lambda port: f"http://127.0.0.1:{port}/kv", there.port, folder / "shared")


_NUMBERS = itertools.count()


class Backend(NamedTuple):
    """A column: `schemes` of `KINDS`, whose tests these are, and the kinds that name its faults in the table."""

    schemes: tuple[str, ...]
    kinds: tuple[str, ...]
    make: Callable[[Server, Path, pytest.MonkeyPatch, ExitStack], Site]


BACKENDS = {
    "file": Backend(("file",), ("file",), _folder),
    "redis": Backend(("redis", "rediss"), ("redis",), _redis),
    "s3": Backend(("s3",), ("s3", "bucket", "http"), _s3),
    "gs": Backend(("gs",), ("gs", "bucket", "http"), _google),
    "az": Backend(("az",), ("az", "bucket", "http"), _azure),
    "web": Backend(("https", "http"), ("web", "http"), _web),
}
WRITABLE = [name for name in BACKENDS if name != "web"]
FAR = [name for name in BACKENDS if name != "file"]  # whatever has a line that can be cut


@contextmanager
def _made(request: pytest.FixtureRequest) -> Iterator[Site]:
    given = request.getfixturevalue
    with ExitStack() as stack:
        site = BACKENDS[request.param].make(given, given("tmp_path"), given("monkeypatch"), stack)
        site.reach()
        yield site


@pytest.fixture(params=["file", "redis", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of an empty shared store on the backends of different code; `WRITABLE` is for several at once."""
    with _made(request) as site:
        yield site.url


@pytest.fixture(params=["redis", "s3"])
def behind(request: pytest.FixtureRequest) -> Iterator[Link]:
    with _made(request) as site, closing(Link(site.port)) as link:
        site.reach(link.port)
        link.url, link.home = site.url, site.home
        yield link
