"""The store of KV records and of what they belong to: the reading side, and the door to the writing side."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import lmdb

from kvtool.core.cache import environment as lmdb_tables
from kvtool.core.cache import keys, layout, space
from kvtool.core.cache.access import AccessLog, read_log
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, load_json
from kvtool.core.cache.environment import Closed, Environment, Snapshot
from kvtool.core.cache.gate import Visit
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.link import KVRead, Link
from kvtool.core.cache.record import DIGEST_BYTES, HEADER_BYTES, Kind, decode_record, payload_part, unseal
from kvtool.core.cache.served import Served, ServedLog
from kvtool.core.cache.view import View
from kvtool.core.codec.levels import MAKER, level_of
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError

if TYPE_CHECKING:
    from kvtool.core.cache.upkeep import Damage
    from kvtool.core.cache.writer import Writer

FORMAT = layout.FORMAT
REPAIR = "run `kvtool store verify --repair`, then ingest again"
_NOTES_SECONDS = 5.0  # what a long session that is killed forgets at most


class Store:
    """A folder of KV records, documents and chunks.

    Every read is its own short transaction, or part of a :meth:`view`: what comes out is a private copy whose digest
    was checked. Readers never wait for a writer. Thread-safe, except that a :class:`Writer` belongs to one thread. Not
    usable across fork.

    Attributes
    ----------
    link : what stands behind the folder, and has more of its KV; None: nothing.
    """

    path: Path
    uuid: str
    link: Link | None = None

    def __init__(self, path: Path, uuid: str) -> None:
        """Use :meth:`open` or :meth:`create_or_open`."""
        self.path = path
        self.uuid = uuid
        self._mutex = threading.Lock()
        self._viewing = threading.RLock()
        self._view: View | None = None
        self._environment: Environment | None = None
        self._attach()
        self._flushed_at = time.monotonic()
        self._access = AccessLog(path, enabled=not self.read_only)
        self._served = ServedLog(path, enabled=not self.read_only)

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
        found = layout.read_store_file(root)
        return cls(root, found.uuid)

    @classmethod
    def create_or_open(cls, path: Path) -> Self:
        """Open the store at `path`; make it first where there is none yet.

        Raises
        ------
        StoreFormatError : `path` is a file, or a folder that holds other things.
        StoreLockedError : another process is just making it (after 10 s).
        """
        from kvtool.core.cache.creation import create_if_missing

        root = Path(os.path.abspath(path))
        create_if_missing(root)
        return cls.open(root)

    def close(self) -> None:
        """Write the access notes and let go of the files; closing twice is fine."""
        if self.link is not None:
            self.link.close()
        self.flush()
        with self._mutex:
            environment, self._environment = self._environment, None
        if environment is not None:
            lmdb_tables.release(environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self) -> None:
        """Open the current generation; once more if a compaction has just switched it."""
        for attempt in range(3):
            generation = layout.current_generation(self.path)
            if generation is None:
                raise DamagedError(f"the store at {self.path} has no data", "ingest again to rebuild it")
            try:
                environment = lmdb_tables.acquire(generation, not self._writable(generation))
                break
            except (DamagedError, FileNotFoundError):
                if attempt == 2 or layout.current_generation(self.path) == generation:
                    raise
        try:
            self._check_identity(environment)
        except BaseException:
            lmdb_tables.release(environment)
            raise
        self._environment = environment

    def _writable(self, generation: Path) -> bool:
        places = (self.path, generation, generation / "data.mdb")
        return all(os.access(place, os.W_OK) for place in places)

    def _check_identity(self, environment: Environment) -> None:
        with environment.read() as snapshot:
            data = snapshot.get(lmdb_tables.META, keys.STORE_KEY)
        if data is None:
            raise StoreFormatError(f"{self.path} holds an LMDB that is not kvtool's", layout.REBUILD)
        inside = load_json(unseal(keys.STORE_KEY, Kind.STORE, data))
        if inside.get("uuid") != self.uuid:
            raise StoreFormatError(f"the data in {self.path} belongs to another store", layout.REBUILD)
        if inside.get("format", 0) > FORMAT:
            raise StoreFormatError(f"the data in {self.path} has format {inside['format']}", "update kvtool")

    def _follow(self) -> None:
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
        lmdb_tables.release(old)

    @property
    def read_only(self) -> bool:
        """Whether nothing here can be written: then reads take no locks and leave no notes."""
        return self._current().read_only

    def _current(self) -> Environment:
        environment = self._environment
        if environment is None:
            raise KvtoolError("the store is closed")
        return environment

    @contextlib.contextmanager
    def view(self) -> Iterator[None]:
        """One state of the store, taken now: until this ends all that is read through this object, by any thread, is
        of it. One view at a time; inside of one, by the same thread, it is the same one.

        It holds on to pages that a writer has replaced, so it lasts a question. Nothing can be written meanwhile
        through this object; others write as they like.
        """
        with self._viewing:
            if self._view is not None:
                yield
                return
            self._follow()
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
    def _read(self) -> Iterator[Snapshot]:
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
            environment = self._current()
            try:
                environment.begin(visit)
                return environment
            except Closed:
                visit.end()
                if self._environment is environment:
                    raise

    # ---- the store itself ----------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """What the core keeps about the store; empty when new. Raises DamagedError."""
        return self._json(keys.MANIFEST_KEY, "the manifest")

    def codec_state(self) -> dict[str, Any]:
        """Which codec profile is in use and what was measured of each level; empty before the first `compress`."""
        return self._json(keys.CODEC_KEY, "what is known of the codec levels")

    def lead_in_state(self) -> dict[str, Any]:
        """Which learned lead-in the next ingest may use: `digest`, `fingerprint`, `ids`; empty before the first fit."""
        return self._json(keys.LEAD_IN_KEY, "what is known of the learned lead-in")

    def budget(self) -> int | None:
        """How many bytes the store's folder may hold; None: as many as the disk. Raises DamagedError."""
        size = self._json(keys.BUDGET_KEY, "the size budget").get("bytes")
        return None if size is None else int(size)

    def pins(self) -> dict[str, Any]:
        """What eviction never touches: `sources` and `chunks` (ids in hex). Raises DamagedError."""
        return {"sources": [], "chunks": []} | self._json(keys.PINS_KEY, "the list of pins")

    def _json(self, key: bytes, what: str) -> dict[str, Any]:
        with self._read() as snapshot:
            return _json_of(snapshot, key, what)

    def profile(self, digest: bytes) -> memoryview | None:
        """Bytes of a codec profile by its digest. Raises DamagedError."""
        return self._fitted(digest, "a codec profile")

    def learned(self, digest: bytes) -> memoryview | None:
        """Bytes of a learned lead-in by its digest. Raises DamagedError."""
        return self._fitted(digest, "the learned lead-in")

    def profile_digests(self) -> list[bytes]:
        """Of all codec profiles and learned lead-ins, sorted."""
        with self._read() as snapshot:
            return list(snapshot.keys(lmdb_tables.PROFILES))

    def _fitted(self, digest: bytes, what: str) -> memoryview | None:
        with self._read() as snapshot:
            data = snapshot.get(lmdb_tables.PROFILES, digest)
        return None if data is None else _unseal_named(digest, Kind.PROFILE, data, what)

    def revision(self) -> int:
        """Grows with every commit of anything that an answer may hang on: equal revisions give equal answers."""
        self._follow()
        with self._read() as snapshot:
            return number_of(snapshot, keys.REVISION_KEY) or 0

    def documents_revision(self) -> int:
        """The revision at which documents changed last; the retrieval index is keyed by it.

        An older kvtool counts changes of documents only, and leaves alone what tells them from others: where that does
        not go with the revision, the revision itself is the one.
        """
        self._follow()
        with self._read() as snapshot:
            revision = number_of(snapshot, keys.REVISION_KEY) or 0
            counted = _json_of(snapshot, keys.DOCUMENTS_KEY, "a counter")
        return int(counted["documents"]) if counted.get("revision") == revision else revision

    def is_collected(self) -> bool:
        """Whether chunks that no document refers to were looked for since documents changed last."""
        with contextlib.suppress(DamagedError):  # then they are looked for, and the counter is written anew
            return bool(self._json(keys.COLLECTED_KEY, "a counter").get("documents") == self.documents_revision())
        return False

    def concerns(self) -> list[str]:
        """Permissions that a careful owner would want to change."""
        return layout.concerns(self.path)

    def side_file(self, name: str) -> Path:
        """Path for ``gate/…`` or ``index/…``, its folder made; write it with :func:`layout.atomic_write`."""
        return layout.side_file(self.path, name)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes.

        Returns
        -------
        ``uuid, format, revision, files, documents, chunks, tokens, records, bytes`` (of all records),
        ``levels {level: {chunks, records, tokens, bytes}}``, ``profiles {count, bytes}``,
        ``file_bytes, live_bytes, free_bytes`` (of the data file), ``folder_bytes``, ``budget`` (or None),
        ``pins {sources, chunks}``, ``disk_free``.
        """
        revision = self.revision()
        levels: dict[str, dict[str, int]] = {}
        tokens: dict[bytes, int] = {}
        with self._read() as snapshot:
            for key, data in snapshot.items(lmdb_tables.LEVELS):
                with contextlib.suppress(DamagedError):  # counted by verify
                    row = keys.LevelRow.unseal(key, data)
                    _add_row(levels.setdefault(key[ID_BYTES:].decode("ascii"), {}), row)
                    tokens[key[:ID_BYTES]] = row.tokens
            counts = {
                "files": sum(1 for _ in snapshot.keys(lmdb_tables.FILES)),
                "documents": sum(1 for _ in snapshot.keys(lmdb_tables.DOCUMENTS)),
                "chunks": sum(1 for _ in snapshot.keys(lmdb_tables.CHUNKS)),
            }
            profiles = [len(data) for _, data in snapshot.items(lmdb_tables.PROFILES)]
            live = snapshot.live_bytes()
        environment = self._current()
        return {
            "uuid": self.uuid,
            "format": FORMAT,
            "revision": revision,
            **counts,
            "tokens": sum(tokens.values()),
            "records": sum(level["records"] for level in levels.values()),
            "bytes": sum(level["bytes"] for level in levels.values()),
            "levels": dict(sorted(levels.items())),
            "profiles": {"count": len(profiles), "bytes": sum(profiles)},
            "file_bytes": environment.file_bytes(),
            "live_bytes": live,
            "free_bytes": max(0, environment.allocated_bytes() - live),
            "folder_bytes": space.folder_bytes(self.path),
            "budget": self.budget(),
            "pins": {name: len(rows) for name, rows in self.pins().items()},
            "disk_free": space.disk_free(self.path),
        }

    # ---- files and documents -------------------------------------------------------------------------------------

    def files(self) -> Iterator[FileEntry]:
        """All files by path. Raises DamagedError."""
        with self._read() as snapshot:
            rows = list(snapshot.items(lmdb_tables.FILES))
        entries = [FileEntry.from_bytes(_unseal_named(key, Kind.FILE, data, "a file entry")) for key, data in rows]
        return iter(sorted(entries, key=lambda entry: entry.path))

    def file(self, path: str) -> FileEntry | None:
        """The file as last ingested. Raises DamagedError."""
        return self.file_at(keys.name_key(path))

    def file_at(self, key: bytes) -> FileEntry | None:
        """The file of a key of :meth:`file_marks`. Raises DamagedError."""
        with self._read() as snapshot:
            data = snapshot.get(lmdb_tables.FILES, key)
        return None if data is None else FileEntry.from_bytes(_unseal_named(key, Kind.FILE, data, "a file entry"))

    def file_marks(self) -> dict[bytes, bytes]:
        """A mark of every file's entry, by key: another mark, and something of the entry is another."""
        with self._read() as snapshot:
            return {key: keys.mark_of(data) for key, data in snapshot.items(lmdb_tables.FILES)}

    def document_mark(self, source: str) -> bytes | None:
        """The same of a document's entry; None: there is none."""
        with self._read() as snapshot:
            data = snapshot.get(lmdb_tables.DOCUMENTS, keys.name_key(source))
        return None if data is None else keys.mark_of(data)

    def document(self, source: str) -> DocumentEntry | None:
        """The document of this source. Raises DamagedError."""
        key = keys.name_key(source)
        with self._read() as snapshot:
            data = snapshot.get(lmdb_tables.DOCUMENTS, key)
        return None if data is None else DocumentEntry.from_bytes(_unseal_named(key, Kind.DOCUMENT, data, "a document"))

    def documents(self) -> Iterator[DocumentEntry]:
        """All documents by source, one transaction each."""
        return (entry for source in self.sources() if (entry := self.document(source)) is not None)

    def sources(self) -> list[str]:
        """Sources of all documents, sorted."""
        return sorted({source for entry in self.files() for source in entry.documents})

    # ---- chunks --------------------------------------------------------------------------------------------------

    def chunk_ids(self) -> list[bytes]:
        """Ids of all chunks, sorted."""
        with self._read() as snapshot:
            return list(snapshot.keys(lmdb_tables.CHUNKS))

    def chunk_info(self, chunk_id: bytes) -> ChunkInfo | None:
        """Token ids, lead-in and side data. Raises DamagedError."""
        with self._read() as snapshot:
            return chunk_info_of(snapshot, chunk_id)

    def has_chunk(self, chunk_id: bytes) -> bool:
        """Whether at least one level can be read, of a chunk whose description is intact or that a link offers."""
        if self.link is not None and self.link.offers(chunk_id):
            return True
        with self._read() as snapshot:
            try:
                return chunk_info_of(snapshot, chunk_id) is not None and bool(_levels_of(snapshot, chunk_id))
            except DamagedError:
                return False

    def levels(self, chunk_id: bytes) -> list[str]:
        """Levels of which all layers are stored or offered by a link, sorted."""
        return list(self.level_sizes(chunk_id))

    def level_sizes(self, chunk_id: bytes) -> dict[str, int]:
        """Bytes of the records of each level of which all layers are stored or offered by a link, by level, sorted."""
        here = self.sizes_here(chunk_id)
        if self.link is None:
            return here
        offered = {level: offer.size for level, offer in self.link.offers(chunk_id).items()}
        return dict(sorted((offered | here).items()))

    def sizes_here(self, chunk_id: bytes) -> dict[str, int]:
        """The same of this folder alone, whatever a link offers."""
        with self._read() as snapshot:
            return _levels_of(snapshot, chunk_id)

    def made_with(self, chunk_id: bytes, level: str) -> str | None:
        """Digest, in hex, of the profile that the records of a nested level name; None: there are none, or it cannot be
        told. Read off the first record's beginning, which is not checked: whoever reads the KV checks it. Of what is
        not here a link's word is taken; nothing is fetched."""
        if not level_of(level).nested:
            return None
        data = None
        with contextlib.suppress(DamagedError), self._read() as snapshot:
            key = keys.record_key(chunk_id, level, 0)
            data = snapshot.beginning(lmdb_tables.RECORDS, key, HEADER_BYTES + MAKER.stop)
        if data is not None:
            return payload_part(data, MAKER).hex()
        offer = self.link.offers(chunk_id).get(level) if self.link is not None else None
        return offer.maker if offer is not None else None

    def record_mark(self, chunk_id: bytes, level: str) -> bytes | None:
        """What tells a chunk's records of a level from others of the same level; None: there are none."""
        with self._read() as snapshot:
            return snapshot.ending(lmdb_tables.RECORDS, keys.record_key(chunk_id, level, 0), DIGEST_BYTES)

    def last_used(self) -> dict[bytes, int]:
        """Chunk id → when it was last used (seconds since 1970): what is stored, and what is only noted so far, by
        this process or by others. Chunks that were never used are not in it."""
        self._access.flush()
        times = read_log(self.path)  # before the store: a writer may be folding it
        for chunk_id, when in self.folded_uses().items():
            times[chunk_id] = max(times.get(chunk_id, 0), when)
        return times

    def folded_uses(self) -> dict[bytes, int]:
        """The same as far as a writer has folded the notes."""
        return self._times(lmdb_tables.USED)

    def added(self) -> dict[bytes, int]:
        """Chunk id → seconds at which it came into this store; chunks of older stores are missing."""
        return self._times(lmdb_tables.ADDED)

    def _times(self, table: bytes) -> dict[bytes, int]:
        times: dict[bytes, int] = {}
        with self._read() as snapshot:
            for key, data in snapshot.items(table):
                with contextlib.suppress(DamagedError):  # only the order of eviction hangs on it
                    times[key] = keys.unseal_number(key, data)
        return times

    def read_kv(self, chunk_id: bytes, level: str, layer: int) -> KVRead | None:
        """One layer of one chunk; None if it is not stored.

        Raises
        ------
        DamagedError : the record is damaged.
        """
        found = self.read_layer([chunk_id], level, layer)[0]
        if isinstance(found, KvtoolError):
            raise found
        return found

    def read_layer(
        self, chunk_ids: Sequence[bytes], level: str, layer: int, before: Callable[[int], None] = lambda number: None
    ) -> list[KVRead | KvtoolError | None]:
        """One layer of many chunks in one transaction; payloads are private, writable and 64-byte aligned in memory.
        What is not here is fetched, where a link offers it.

        Parameters
        ----------
        before : told each chunk's number before its record is read.

        Returns
        -------
        For each chunk its header and payload, None if it is not stored, or what is wrong with it or its place.
        """
        wanted = [keys.record_key(chunk_id, level, layer) for chunk_id in chunk_ids]
        copies: list[memoryview | DamagedError | None] = []
        with self._read() as snapshot:
            if len(wanted) > 1:
                snapshot.will_need(lmdb_tables.RECORDS, wanted)
            for number, key in enumerate(wanted):
                before(number)
                copies.append(_copy(snapshot, key))
        found = [read_record(chunk_id, level, layer, data) for chunk_id, data in zip(chunk_ids, copies, strict=True)]
        if self.link is not None:
            self.link.complete(found, chunk_ids, level, layer, before)
        return found

    # ---- upkeep --------------------------------------------------------------------------------------------------

    def note_access(self, chunk_ids: Sequence[bytes], missed: int = 0) -> None:
        """Remember that a question used these chunks now, and how many it missed; takes no lock, and does nothing on a
        read-only store. What a link fetched for the question is written."""
        self.note_use(chunk_ids)
        self._served.note(len(chunk_ids), missed)
        if time.monotonic() - self._flushed_at > _NOTES_SECONDS:
            self.flush()
        if self.link is not None:
            self.link.keep_fetched()

    def note_use(self, chunk_ids: Sequence[bytes]) -> None:
        """The same of chunks that were not found: computed for a question, and stored now."""
        self._access.note(chunk_ids)

    def flush(self) -> None:
        """Write the access notes now instead of within seconds, or at close."""
        self._flushed_at = time.monotonic()
        self._access.flush()
        self._served.flush()

    def served(self) -> Served:
        """What questions found in the store, as far as it was written."""
        return self._served.total()

    def verify(self, sample: Fraction | None = None) -> list[Damage]:
        """Check every digest and every reference, in a child process that may die of what it finds.

        Parameters
        ----------
        sample : check the KV of only this part of the chunks (the same part every time).
        """
        from kvtool.core.cache.upkeep import verify

        return verify(self, sample)

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
        from kvtool.core.cache.lock import writer_lock
        from kvtool.core.cache.upkeep import remove_leftovers
        from kvtool.core.cache.writer import Writer

        if self.read_only:
            raise KvtoolError(f"the store at {self.path} is read-only", "copy it to a writable place")
        with self._viewing, writer_lock(self.path, wait):
            if self._view is not None:  # the map may have to change, for which no transaction may be open
                raise KvtoolError("nothing can be written through a store while a view of it is held", "end it first")
            self._follow()
            remove_leftovers(self.path)
            self._current().pad()
            writer = Writer(self, max_size)
            try:
                yield writer
                writer.flush()
                if self._access.is_long:
                    writer.fold_access()
            finally:
                writer.end()


# ---- reading inside a snapshot -----------------------------------------------------------------------------------


def number_of(snapshot: Snapshot, key: bytes) -> int | None:
    """A counter; None where it was never written. Raises DamagedError."""
    data = snapshot.get(lmdb_tables.META, key)
    return None if data is None else keys.unseal_number(key, data)


def _json_of(snapshot: Snapshot, key: bytes, what: str) -> dict[str, Any]:
    data = snapshot.get(lmdb_tables.META, key)
    value: dict[str, Any] = {} if data is None else load_json(_unseal_named(key, Kind.MANIFEST, data, what))
    return value


def chunk_info_of(snapshot: Snapshot, chunk_id: bytes) -> ChunkInfo | None:
    """A chunk's description; raises DamagedError."""
    data = snapshot.get(lmdb_tables.CHUNKS, keys.check_chunk_id(chunk_id))
    return None if data is None else ChunkInfo.from_bytes(_unseal_named(chunk_id, Kind.CHUNK, data, "a chunk"))


def _levels_of(snapshot: Snapshot, chunk_id: bytes) -> dict[str, int]:
    found = {}
    for key, data in snapshot.items(lmdb_tables.LEVELS, keys.check_chunk_id(chunk_id)):
        with contextlib.suppress(DamagedError):  # as good as missing: its records are computed again
            found[key[ID_BYTES:].decode("ascii")] = keys.LevelRow.unseal(key, data).size
    return found


def _copy(snapshot: Snapshot, key: bytes) -> memoryview | DamagedError | None:
    try:
        return snapshot.get(lmdb_tables.RECORDS, key)
    except DamagedError as error:
        return error


def read_record(
    chunk_id: bytes, level: str, layer: int, data: memoryview | DamagedError | None
) -> KVRead | KvtoolError | None:
    """A record as it came, checked: its digest, and that it is the one that was asked for."""
    if data is None or isinstance(data, DamagedError):
        return data
    try:
        header, payload = decode_record(chunk_id, data)
    except DamagedError as error:
        return error
    if (header.level, header.layer) != (level, layer):
        return DamagedError(f"a record of level {header.level}, layer {header.layer} stands here")
    return header, payload


def _unseal_named(key: bytes, kind: Kind, data: memoryview, what: str) -> memoryview:
    try:
        return unseal(key, kind, data)
    except DamagedError as error:
        raise DamagedError(f"{what} of the store is damaged: {error.message}", REPAIR) from error


def _add_row(total: dict[str, int], row: keys.LevelRow) -> None:
    for name, count in (("chunks", 1), ("records", row.layers), ("tokens", row.tokens), ("bytes", row.size)):
        total[name] = total.get(name, 0) + count
