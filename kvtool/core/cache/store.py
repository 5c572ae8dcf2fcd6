"""Opens and makes stores of KV records and of what they belong to, and hands out their one writer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtool.core.cache import layout
from kvtool.core.cache.creation import create_if_missing
from kvtool.core.cache.generations import remove_leftovers
from kvtool.core.cache.lock import writer_lock
from kvtool.core.cache.reader import StoreReader
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import KvtoolError


class Store(StoreReader):
    """A folder of KV records, documents and chunks; see :class:`StoreReader`. A :class:`Writer` of it belongs to one
    thread."""

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the store at `path`, which may be read-only.

        Raises
        ------
        StoreNotFoundError : there is none.
        StoreFormatError : newer format, foreign data, a file.
        DamagedError : truncated, or a part of it is missing.
        """
        root = Path(os.path.abspath(path))
        return cls(root, layout.read_store_file(root).uuid)

    @classmethod
    def create_or_open(cls, path: Path) -> Self:
        """Open the store at `path`; make it first where there is none yet.

        Raises
        ------
        StoreFormatError : `path` is a file, or a folder that holds other things.
        StoreLockedError : another process is just making it (after 10 s).
        """
        root = Path(os.path.abspath(path))
        create_if_missing(root)
        return cls.open(root)

    def close(self) -> None:
        """Write the access notes and let go of the files; closing twice is fine."""
        if self.link is not None:
            self.link.close()
        self.flush()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- writing -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writer(self, wait: float = 0.0, max_size: int | None = None) -> Iterator[Writer]:
        """The one writer of the store. Leaving normally commits what is buffered; leaving by an error drops it.

        Parameters
        ----------
        wait : seconds to wait for another writer; negative: for ever.
        max_size : bytes that the store's folder may hold; None: the store's own budget.

        Raises
        ------
        StoreLockedError : another writer holds the store.
        KvtoolError : the store is read-only, or this thread holds a view of it.
        """
        if self.read_only:
            raise KvtoolError(f"the store at {self.path} is read-only", "copy it to a writable place")
        with self.unviewed(), writer_lock(self.path, wait):
            self.follow()
            remove_leftovers(self.path)
            self.environment.pad()
            writer = Writer(self, max_size)
            try:
                yield writer
                writer.flush()
                if self.notes_are_long:
                    writer.fold_access()
            finally:
                writer.end()
