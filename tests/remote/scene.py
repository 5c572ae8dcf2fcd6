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
    """The means of a fault.

    Attributes
    ----------
    site : where the shared store is; `link`: the proxy before its server, if it has one.
    middle : bytes that come through the link, or reads of the folder, until half of all has come.
    patch, later : undone, and called, when the trouble is over.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.link = Link(site.reading_port) if site.port else None
        if self.link is not None:
            site.ask_at(site, self.link.port)
        self.middle = 0.0
        self.patch, self.later = pytest.MonkeyPatch(), ExitStack()

    @property
    def folder(self) -> Path:
        """Return the folder of the values."""
        assert self.site.folder is not None
        return self.site.folder

    def through(self) -> Link:
        """Return the link before the server."""
        assert self.link is not None
        return self.link

    @contextmanager
    def made(self, make: Callable[[Scene], object], middle: float) -> Iterator[None]:
        """Cause the trouble inside, and end it afterwards."""
        self.middle = middle
        try:
            make(self)
            yield
        finally:
            self.patch.undo()
            self.later.close()

    def blobs(self, patience: float = 30.0) -> Blobs:
        """Open the shared store as a reader does."""
        return open_blobs(self.site.url, patience)

    @contextmanager
    def behind(self) -> Iterator[Blobs]:
        """Open the shared store as a writer does, without any fault."""
        with closing(open_blobs(self.site.home)) as blobs:
            yield blobs

    def close(self) -> None:
        """Close the link: the shared store is reached without it again."""
        if self.link is not None:
            self.link.close()
            self.site.ask_at(self.site, self.site.reading_port)
