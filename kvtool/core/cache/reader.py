"""The reading side of a store: its documents, chunks and states, and the notes of when they were used."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from kvtool.core.cache import layout, tables
from kvtool.core.cache.chunks import ChunkReader
from kvtool.core.cache.entries import DocumentEntry, FileEntry, load_json
from kvtool.core.cache.identity import ID_BYTES, ORIGIN, UNKNOWN, Origin, origin_of
from kvtool.core.cache.record import Kind
from kvtool.core.cache.side_files import UseLog, combine_scores, fold_uses, read_json, read_log, write_json
from kvtool.core.cache.tables import Place, Side, StretchInfo, described, named_part, opened_part, part_key, read_row
from kvtool.core.cache.tree import Snapshot, checked_payload, damage_of
from kvtool.core.errors import DamagedError, NoSpaceError

_NOTES_SECONDS = 5.0  # maximum age of the notes that a killed session loses


class StoreReader(ChunkReader):
    """Reads a folder of KV records, documents and chunks. Every read is its own short transaction, or part of a
    :meth:`view`: the result is a private copy whose digest was checked. Readers never wait for a writer. Thread-safe.
    Not usable across fork."""

    def __init__(self, path: Path, uuid: str) -> None:
        super().__init__(path, uuid)
        self._flushed_at = time.monotonic()
        self.use_log = UseLog(path, enabled=not self.read_only)

    @property
    def is_front(self) -> bool:
        """True for the local store of a shared store: all of its KV can be fetched again."""
        return (self.path / layout.REMOTE_FOLDER).is_dir()

    # ---- the folder ----------------------------------------------------------------------------------------------

    def concerns(self) -> list[str]:
        mode = self.path.stat().st_mode
        if mode & 0o022:
            return [f"{self.path} can be written by others: chmod 700 it"]
        return [f"{self.path} can be read by others: chmod 700 it"] if mode & 0o055 else []

    def side_file(self, name: str) -> Path:
        """Return the path of a side file (``gate/…``, ``index/…``) and make its folder. Raises ValueError for names
        outside the store's folder and those of the store's own files."""
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or name.startswith("/") or ".." in parts or parts[0] == layout.DATA_FOLDER:
            raise ValueError(f"a side file is named folder/name, not {name!r}")
        path = self.path.joinpath(*parts)
        with contextlib.suppress(OSError):  # a read-only store: the caller finds no file there
            layout.make_folder(path.parent)
        return path

    def write_side(self, name: str, value: dict[str, Any]) -> bool:
        """Write a JSON object that can be made again as ``folder/name``. False: it could not be written."""
        if self.read_only:
            return False
        try:
            write_json(self.side_file(name), value)
        except (OSError, NoSpaceError):
            return False
        return True

    def read_side(self, name: str, **marks: Any) -> dict[str, Any]:
        return read_json(self.side_file(name), **marks)

    # ---- notes of use --------------------------------------------------------------------------------------------

    def note_access(self, chunk_ids: Sequence[bytes], missed: int = 0, again: bool = False) -> None:
        """Note that a question used these chunks now, and how many it missed, without a lock; what a link fetched for
        it is written. `again`: the question is counted already."""
        self.use_log.note_uses(chunk_ids)
        if not again:
            self.use_log.note_question(len(chunk_ids), missed)
        if time.monotonic() - self._flushed_at > _NOTES_SECONDS:
            self.flush()
        if self.link is not None:
            self.link.keep_fetched()

    def flush(self) -> None:
        """Write the access notes now instead of within seconds, or at close."""
        self._flushed_at = time.monotonic()
        self.use_log.flush()

    def last_used(self) -> dict[bytes, int]:
        """Map each chunk id that was ever used to its last use (seconds since 1970), stored or only noted so far."""
        noted = self._noted()  # before the store: a writer may be folding it
        return fold_uses([*noted, *self.times(tables.USED).items()], max)

    def warmth(self) -> dict[bytes, float]:
        """Map each chunk id that was ever used to its LRFU score, stored or only noted so far."""
        noted = self._noted()
        return fold_uses([*noted, *self.times(tables.WARM).items()], combine_scores)

    def _noted(self) -> list[tuple[bytes, int]]:
        self.use_log.flush()
        return read_log(self.path)

    def added(self) -> dict[bytes, int]:
        """Map each chunk id to the seconds at which it came into this store."""
        return self.times(tables.ADDED)

    def times(self, table: bytes) -> dict[bytes, int]:
        """Map each key of a table of times, or of scores, to its number in the store."""
        times: dict[bytes, int] = {}
        with self.snapshot() as snapshot:
            for key, data in snapshot.items(table):
                with contextlib.suppress(DamagedError):  # it only decides the order of eviction
                    times[key] = tables.unseal_number(key, data)
        return times

    # ---- files and documents -------------------------------------------------------------------------------------

    def files(self) -> Iterator[FileEntry]:
        """Yield all files by path. Raises DamagedError."""
        with self.snapshot() as snapshot:
            rows = list(snapshot.items(tables.FILES))
        entries = [FileEntry.from_bytes(checked_payload(key, Kind.FILE, data, "a file entry")) for key, data in rows]
        return iter(sorted(entries, key=lambda entry: entry.path))

    def file(self, path: str) -> FileEntry | None:
        return self.file_at(tables.name_key(path))

    def file_at(self, key: bytes) -> FileEntry | None:
        with self.snapshot() as snapshot:
            payload = snapshot.payload(tables.FILES, key, Kind.FILE, "a file entry")
        return None if payload is None else FileEntry.from_bytes(payload)

    def files_with(self, sources: Iterable[str]) -> list[FileEntry]:
        """Find the files of these documents, by path; a file without documents is its own. They are looked for under a
        document's name and the part before its last or first `#`, then in all files. Raises DamagedError."""
        files: dict[str, FileEntry] = {}
        lost: set[str] = set()
        for source in sources:
            paths = dict.fromkeys((source, source.rpartition("#")[0], source.partition("#")[0]))
            entries = (self.file(path) for path in paths if path)
            for entry in entries:
                if entry is not None and source in (entry.documents or (entry.path,)):
                    files[entry.path] = entry
                    break
            else:
                lost.add(source)
        if lost:
            files |= {
                entry.path: entry for entry in self.files() if not lost.isdisjoint((entry.path, *entry.documents))
            }
        return [files[path] for path in sorted(files)]

    def origin_of(self, source: str) -> str:
        """Name the pack, store or signer that a document came from; "" for one that was ingested here."""
        with contextlib.suppress(DamagedError):
            return next((entry.origin.name for entry in self.files_with([source])), "")
        return ""

    def file_marks(self) -> dict[bytes, bytes]:
        """Map each file's key to a mark of its entry: a changed entry has another mark."""
        with self.snapshot() as snapshot:
            return {key: tables.mark_of(data) for key, data in snapshot.items(tables.FILES)}

    def document(self, source: str) -> DocumentEntry | None:
        payload = self.document_bytes(source)
        return None if payload is None else DocumentEntry.from_bytes(payload)

    def document_bytes(self, source: str) -> memoryview | None:
        with self.snapshot() as snapshot:
            return snapshot.payload(tables.DOCUMENTS, tables.name_key(source), Kind.DOCUMENT, "a document")

    def document_mark(self, source: str) -> bytes | None:
        with self.snapshot() as snapshot:
            data = snapshot.get(tables.DOCUMENTS, tables.name_key(source))
        return None if data is None else tables.mark_of(data)

    def documents(self) -> Iterator[DocumentEntry]:
        return (entry for source in self.sources() if (entry := self.document(source)) is not None)

    def sources(self) -> list[str]:
        return sorted({source for entry in self.files() for source in entry.documents})

    # ---- checkpoints of states -----------------------------------------------------------------------------------

    def stretches(self) -> dict[bytes, StretchInfo]:
        with self.snapshot() as snapshot:
            return dict(described(snapshot))

    def stretch(self, stretch: bytes) -> StretchInfo | None:
        with self.snapshot() as snapshot:
            payload = snapshot.payload(tables.STRETCHES, stretch, Kind.STRETCH, "a state checkpoint")
        return None if payload is None else StretchInfo.from_bytes(payload)

    def read_part(self, stretch: bytes, place: Place) -> memoryview:
        """Read a part: private, writable, its payload after a header of 64 bytes on a 64-byte boundary. Raises
        DamagedError: it is damaged, or missing."""
        return opened_part(stretch, place, self._stretch_row(part_key(stretch, place), named_part(place)))

    def sealed_value(self, stretch: bytes, part: str) -> bytes:
        """Read a description, or a part by its name, in its envelope. Raises DamagedError."""
        key, what = stretch, "descriptions of a state checkpoint"
        if part:
            side, _, layer = part.partition("-")
            place = cast(Side, side), int(layer)
            key, what = part_key(stretch, place), named_part(place)
        data = self._stretch_row(key, what)
        read_row(key, data)
        return bytes(data)

    def _stretch_row(self, key: bytes, what: str) -> memoryview:
        with self.snapshot() as snapshot:
            data = snapshot.get(tables.STRETCHES, key)
        if data is None:
            raise DamagedError(f"the {what} are missing")
        return data

    # ---- facts that the store keeps about itself -----------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        return self._json(tables.MANIFEST_KEY, "the manifest")

    def made_by(self) -> Origin:
        """Origin of the store's settings: HERE, unless it began as a copy."""
        try:
            return origin_of(self.manifest().get(ORIGIN))
        except ValueError:
            return UNKNOWN

    def codec_state(self) -> dict[str, Any]:
        """Codec profile in use and the measurements of each level; empty before the first `compress`."""
        return self._json(tables.CODEC_KEY, "what is known of the codec levels")

    def budget(self) -> int | None:
        """Bytes that the store's folder may hold; None: no limit."""
        size = self._json(tables.BUDGET_KEY, "the size budget").get("bytes")
        return None if size is None else int(size)

    def pins(self) -> list[str]:
        """Sources of the documents that are never evicted."""
        return list(self._json(tables.PINS_KEY, "the list of pins").get("sources", ()))

    def _json(self, key: bytes, what: str) -> dict[str, Any]:
        with self.snapshot() as snapshot:
            return _json_of(snapshot, key, what)

    def profile(self, digest: bytes) -> memoryview | None:
        with self.snapshot() as snapshot:
            return snapshot.payload(tables.PROFILES, digest, Kind.PROFILE, "a codec profile")

    def profile_digests(self) -> list[bytes]:
        with self.snapshot() as snapshot:
            return list(snapshot.keys(tables.PROFILES))

    # ---- counters ------------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """Grows with every commit that an answer may depend on: equal revisions give equal answers."""
        self.follow()
        with self.snapshot() as snapshot:
            return _revision_of(snapshot)

    def documents_revision(self) -> int:
        """Revision at which documents changed last; the retrieval index is keyed by it."""
        return self._counted("documents")

    def dropped_revision(self) -> int:
        """Revision at which chunks that a document may refer to lost something last."""
        return self._counted("dropped")

    def _counted(self, name: str) -> int:
        self.follow()
        with self.snapshot() as snapshot:
            counted = _json_of(snapshot, tables.DOCUMENTS_KEY, "a counter")
            return int(counted.get(name, _revision_of(snapshot)))

    def is_collected(self) -> bool:
        """True if chunks without a document were looked for after the last change of documents."""
        with contextlib.suppress(DamagedError):  # then they are looked for, and the counter is written anew
            return bool(self._json(tables.COLLECTED_KEY, "a counter").get("documents") == self.documents_revision())
        return False

    # ---- sizes ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        revision = self.revision()
        levels: dict[str, Counter[str]] = {}
        tokens: dict[bytes, int] = {}
        with self.snapshot() as snapshot:
            for key, data in snapshot.items(tables.LEVELS):
                with contextlib.suppress(DamagedError):  # counted by verify
                    row = tables.LevelRow.unseal(key, data)
                    total = levels.setdefault(key[ID_BYTES:].decode("ascii"), Counter())
                    total.update(chunks=1, records=row.layers, tokens=row.tokens, bytes=row.size)
                    tokens[key[:ID_BYTES]] = row.tokens
            counted = {"files": tables.FILES, "documents": tables.DOCUMENTS, "chunks": tables.CHUNKS}
            counts = {name: sum(1 for _ in snapshot.keys(table)) for name, table in counted.items()}
            profiles = [size for _, size in snapshot.sizes(tables.PROFILES)]
            parts = list(snapshot.sizes(tables.STRETCHES))
            live = snapshot.live_bytes()
        return {
            "uuid": self.uuid,
            "format": layout.FORMAT,
            "revision": revision,
            **counts,
            "tokens": sum(tokens.values()),
            "records": sum(level["records"] for level in levels.values()),
            "bytes": sum(level["bytes"] for level in levels.values()),
            "levels": {level: dict(total) for level, total in sorted(levels.items())},
            "profiles": {"count": len(profiles), "bytes": sum(profiles)},
            "checkpoints": {
                "count": sum(len(key) == ID_BYTES for key, _ in parts),
                "bytes": sum(size for _, size in parts),
            },
            "file_bytes": self.environment.file_bytes(),
            "live_bytes": live,
            "free_bytes": self.environment.free_beside(live),
            "folder_bytes": layout.folder_bytes(self.path),
            "budget": self.budget(),
            "pins": {"sources": len(self.pins())},
            "disk_free": layout.disk_free(self.path),
        }


def _revision_of(snapshot: Snapshot) -> int:
    data = snapshot.get(tables.META, tables.REVISION_KEY)
    with damage_of("the revision"):
        return 0 if data is None else tables.unseal_number(tables.REVISION_KEY, data)


def _json_of(snapshot: Snapshot, key: bytes, what: str) -> dict[str, Any]:
    payload = snapshot.payload(tables.META, key, Kind.MANIFEST, what)
    try:
        value = {} if payload is None else load_json(payload)
    except ValueError as error:
        raise DamagedError(f"{what} cannot be read") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{what} cannot be read")
    return value
