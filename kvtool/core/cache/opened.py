"""A store's data file, opened: a snapshot for each read, or one for all reads of a question."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb

from kvtool.core.cache import environment as environments
from kvtool.core.cache import keys, layout, tables
from kvtool.core.cache.entries import load_json
from kvtool.core.cache.environment import Closed, Environment
from kvtool.core.cache.gate import Visit
from kvtool.core.cache.record import Kind, unseal
from kvtool.core.cache.snapshot import Snapshot, damage_of
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError


class Opened:
    """The base of :class:`kvtool.core.cache.store.Store`: knows where the data is, and nothing of what is in it."""

    def __init__(self, path: Path, uuid: str) -> None:
        self.path = path
        self.uuid = uuid
        self._mutex = threading.Lock()
        self._viewing = threading.RLock()
        self._view: View | None = None
        self._environment: Environment | None = None
        self._attach()

    def _attach(self) -> None:
        """Open the current generation; once more if a compaction has just switched it."""
        for attempt in range(3):
            generation = layout.current_generation(self.path)
            if generation is None:
                raise DamagedError(f"the store at {self.path} has no data", "ingest again to rebuild it")
            try:
                environment = environments.acquire(generation, not self._writable(generation))
                break
            except (DamagedError, FileNotFoundError):
                if attempt == 2 or layout.current_generation(self.path) == generation:
                    raise
        try:
            self._check_identity(environment)
        except BaseException:
            environments.release(environment)
            raise
        self._environment = environment

    def _writable(self, generation: Path) -> bool:
        places = (self.path, generation, generation / "data.mdb")
        return all(os.access(place, os.W_OK) for place in places)

    def _check_identity(self, environment: Environment) -> None:
        with environment.read() as snapshot:
            data = snapshot.get(tables.META, keys.STORE_KEY)
        if data is None:
            raise StoreFormatError(f"{self.path} holds an LMDB that is not kvtool's", layout.REBUILD)
        with damage_of("the name", layout.REBUILD):
            inside = load_json(unseal(keys.STORE_KEY, Kind.STORE, data))
        if inside.get("uuid") != self.uuid:
            raise StoreFormatError(f"the data in {self.path} belongs to another store", layout.REBUILD)
        if inside.get("format", 0) > layout.FORMAT:
            raise StoreFormatError(f"the data in {self.path} has format {inside['format']}", "update kvtool")

    def _release(self) -> None:
        """Let go of the files; twice is fine."""
        with self._mutex:
            environment, self._environment = self._environment, None
        if environment is not None:
            environments.release(environment)

    def follow(self) -> None:
        """Move on to the generation that a compaction made current; a view stays where it is."""
        if self._view is not None:
            return
        generation = layout.current_generation(self.path)
        with self._mutex:
            old = self._environment
            if old is None or generation is None or old.generation == generation:
                if old is not None and generation is not None and not old.is_at(generation):
                    raise StoreFormatError(f"another store stands at {self.path} now", "open it again")
                return
            self._attach()
        environments.release(old)

    @property
    def environment(self) -> Environment:
        """The LMDB environment of the generation that was current when it was last looked at."""
        environment = self._environment
        if environment is None:
            raise Closed("the store is closed")
        return environment

    @property
    def read_only(self) -> bool:
        """Return True if the store cannot be written: then reads take no locks and leave no notes."""
        return self.environment.read_only

    # ---- reading -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def view(self) -> Iterator[None]:
        """Hold one state of the store, as of now: until the end, all reads through this object, by any thread, see that
        state. One view at a time; a nested view of the same thread is the same view.

        A view keeps pages that a writer has replaced, so it should last no longer than a question. Nothing can be
        written through this object meanwhile; other processes can.
        """
        with self._viewing:
            if self._view is not None:
                yield
                return
            self.follow()
            visit, view = Visit(), None
            try:
                view = self._view = View(self._begin(visit), visit)
                yield
            finally:
                if view is None:
                    visit.end()
                elif self._view is view:
                    self.end_view()

    def end_view(self) -> None:
        """End the view of this thread now, not at the end of its block; without one this does nothing."""
        with self._viewing:
            view, self._view = self._view, None
            if view is not None:
                view.leave()

    @contextlib.contextmanager
    def unviewed(self) -> Iterator[None]:
        """Keep views out, for a writer: the map may have to change, for which no transaction may be open.

        Raises
        ------
        KvtoolError : this thread holds a view.
        """
        with self._viewing:
            if self._view is not None:
                raise KvtoolError("nothing can be written through a store while a view of it is held", "end it first")
            yield

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Hold one consistent state of the store for a short read: the view's, if there is a view."""
        view = self._view
        if view is not None and view.enter():
            try:
                yield view.snapshot
            except lmdb.Error as error:
                raise view.environment.read_failure(error) from error
            finally:
                view.leave()
            return
        visit = Visit()
        try:
            environment = self._begin(visit)
            yield environment.snapshot(visit)
        except lmdb.Error as error:
            raise environment.read_failure(error) from error
        finally:
            visit.end()

    def _begin(self, visit: Visit) -> Environment:
        """Begin in the current environment; in the next one if a switch of generation closes this one meanwhile.

        Under no lock: who waits at the environment's gate must keep out nobody that is inside already.
        """
        while True:
            environment = self.environment
            try:
                environment.begin(visit)
                return environment
            except Closed:
                visit.end()
                if self._environment is environment:
                    raise


class View:
    """A read transaction that threads share. It ends when its last user leaves: a loader may still read."""

    def __init__(self, environment: Environment, visit: Visit) -> None:
        self.environment = environment
        self.snapshot: Snapshot = environment.snapshot(visit)
        self._visit = visit
        self._users = 1
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Use it until :meth:`leave`; False: it has ended."""
        with self._lock:
            if not self._users:
                return False
            if not self._visit.inside:
                raise KvtoolError("the store's view was lost while its map changed", "ask again")
            self._users += 1
            return True

    def leave(self) -> None:
        """End the use that :meth:`enter` or making it began."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._visit.end()
