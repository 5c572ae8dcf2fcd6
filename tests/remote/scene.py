"""A shared store on one backend that a fault happens to, and what is undone when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from kvtool.core.remote.blobs import Blobs, open_blobs
from tests.remote.backends import Site
from tests.remote.serving import Link


class Scene:
    """A shared store that a fault happens to. `middle`: bytes through the link, or reads of the folder, until half of
    all has come."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.link = Link(site.reading_port) if site.port else None
        if self.link is not None:
            site.ask_at(site, self.link.port)
        self.middle = 0.0
        self.patch, self.later = pytest.MonkeyPatch(), ExitStack()

    @property
    def folder(self) -> Path:
        assert self.site.folder is not None
        return self.site.folder

    def through(self) -> Link:
        assert self.link is not None
        return self.link

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
            self.site.ask_at(self.site, self.site.reading_port)
