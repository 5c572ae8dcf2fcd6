"""Copies of a tier's catalogue on this machine, so that of the next one only what has changed is fetched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.layout import TEMPORARY, make_folder
from kvtool.core.common.files import cache_dir
from kvtool.core.common.urls import place_of
from kvtool.core.errors import KvtoolError
from kvtool.core.remote.descend import new_name
from kvtool.core.remote.entries import digest_of


class Shelf:
    """Values by their digests, below kvtool's cache folder. Where none can be kept, none is.

    Parameters
    ----------
    url : of the tier, as people are shown it.
    """

    def __init__(self, url: str) -> None:
        name = hashlib.blake2b(place_of(url).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._folder: Path | None = None
        with suppress(KvtoolError):
            self._folder = cache_dir() / "catalogues" / name

    def get(self, digest: str) -> bytes | None:
        """A value; None: it is not here, or damaged."""
        with suppress(OSError):
            if self._folder is not None and digest_of(value := (self._folder / digest).read_bytes()) == digest:
                return value
        return None

    def put(self, digest: str, value: bytes) -> None:
        """Keep a value. It need not survive a power loss: what is damaged is fetched again."""
        if self._folder is None:
            return
        with suppress(OSError):
            make_folder(self._folder)
            beside = self._folder / new_name()
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                file.write(value)
            beside.rename(self._folder / digest)

    def keep(self, digests: Collection[str]) -> None:
        """Forget all others."""
        with suppress(OSError):
            for path in self._folder.iterdir() if self._folder is not None else ():
                if path.name not in digests and not path.name.startswith(TEMPORARY):
                    path.unlink(missing_ok=True)
