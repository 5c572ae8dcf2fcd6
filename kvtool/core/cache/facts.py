"""Facts that a store keeps about itself: its manifest and settings, its counters, the number of its entries."""

from __future__ import annotations

import contextlib
from typing import Any

from kvtool.core.cache import keys, layout, space, tables
from kvtool.core.cache.entries import load_json
from kvtool.core.cache.identity import ID_BYTES, ORIGIN, UNKNOWN, Origin, origin_of
from kvtool.core.cache.opened import Opened
from kvtool.core.cache.record import Kind
from kvtool.core.cache.snapshot import Snapshot, damage_of
from kvtool.core.cache.stretches import count_alone
from kvtool.core.errors import DamagedError


class Facts(Opened):
    """The part of :class:`kvtool.core.cache.store.Store` that reads the tables of facts and of profiles."""

    def manifest(self) -> dict[str, Any]:
        """Return the core's facts about the store; empty when new. Raises DamagedError."""
        return self._json(keys.MANIFEST_KEY, "the manifest")

    def made_by(self) -> Origin:
        """Return who decided what the store is made with: HERE, unless it began as a copy. Raises DamagedError."""
        try:
            return origin_of(self.manifest().get(ORIGIN))
        except ValueError:
            return UNKNOWN

    def codec_state(self) -> dict[str, Any]:
        """Return the codec profile in use and the measurements of each level; empty before the first `compress`."""
        return self._json(keys.CODEC_KEY, "what is known of the codec levels")

    def budget(self) -> int | None:
        """Return the bytes that the store's folder may hold; None: as many as the disk. Raises DamagedError."""
        size = self._json(keys.BUDGET_KEY, "the size budget").get("bytes")
        return None if size is None else int(size)

    def pins(self) -> dict[str, Any]:
        """Return the entries that are never evicted: `sources` and `chunks` (ids in hex). Raises DamagedError."""
        return {"sources": [], "chunks": []} | self._json(keys.PINS_KEY, "the list of pins")

    def unfinished(self) -> dict[str, tuple[bytes, ...]]:
        """Return the files of which an ingest has stored some chunks and not all: path → ids of its chunks. A list that
        is damaged counts as empty: only the work of computing them again is lost with it."""
        with contextlib.suppress(DamagedError, ValueError, TypeError, AttributeError):
            rows = self._json(keys.UNFINISHED_KEY, "the list of unfinished files")
            packed = {str(path): bytes.fromhex(ids) for path, ids in rows.items()}
            return {
                path: tuple(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))
                for path, ids in packed.items()
            }
        return {}

    def _json(self, key: bytes, what: str) -> dict[str, Any]:
        with self.snapshot() as snapshot:
            return _json_of(snapshot, key, what)

    def profile(self, digest: bytes) -> memoryview | None:
        """The codec profile of a digest, or None. Raises DamagedError."""
        with self.snapshot() as snapshot:
            return snapshot.payload(tables.PROFILES, digest, Kind.PROFILE, "a codec profile")

    def profile_digests(self) -> list[bytes]:
        """The digests of all codec profiles, sorted; longer ones name learned lead-ins of earlier versions."""
        with self.snapshot() as snapshot:
            return list(snapshot.keys(tables.PROFILES))

    # ---- counters ------------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """Grows with every commit of anything that an answer may hang on: equal revisions give equal answers."""
        self.follow()
        with self.snapshot() as snapshot:
            return _revision_of(snapshot)

    def documents_revision(self) -> int:
        """The revision at which documents changed last; the retrieval index is keyed by it.

        An older kvtool counts changes of documents only, and leaves alone what tells them from others: where that does
        not go with the revision, the revision itself is the one.
        """
        return self._counted("documents")

    def dropped_revision(self) -> int:
        """The revision at which something was dropped last of chunks that a document may refer to: as long as it stays,
        what was whole is. It is told as :meth:`documents_revision` is."""
        return self._counted("dropped")

    def _counted(self, name: str) -> int:
        self.follow()
        with self.snapshot() as snapshot:
            revision = _revision_of(snapshot)
            counted = _json_of(snapshot, keys.DOCUMENTS_KEY, "a counter")
        return int(counted.get(name, revision)) if counted.get("revision") == revision else revision

    def is_collected(self) -> bool:
        """Return True if chunks without a document were looked for after the last change of documents."""
        with contextlib.suppress(DamagedError):  # then they are looked for, and the counter is written anew
            return bool(self._json(keys.COLLECTED_KEY, "a counter").get("documents") == self.documents_revision())
        return False

    # ---- sizes ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts and sizes.

        Returns
        -------
        ``uuid, format, revision, files, documents, chunks, tokens, records, bytes`` (of all records),
        ``levels {level: {chunks, records, tokens, bytes}}``, ``profiles {count, bytes}``,
        ``stretches {count, bytes, alone}`` (of answered prompts, of a model that keeps states; `alone`: how many of
        them are of chunks that were computed alone),
        ``file_bytes, live_bytes, free_bytes`` (of the data file), ``folder_bytes``, ``budget`` (or None),
        ``pins {sources, chunks}``, ``disk_free``.
        """
        revision = self.revision()
        levels: dict[str, dict[str, int]] = {}
        tokens: dict[bytes, int] = {}
        with self.snapshot() as snapshot:
            for key, data in snapshot.items(tables.LEVELS):
                with contextlib.suppress(DamagedError):  # counted by verify
                    row = keys.LevelRow.unseal(key, data)
                    _add_row(levels.setdefault(key[ID_BYTES:].decode("ascii"), {}), row)
                    tokens[key[:ID_BYTES]] = row.tokens
            counted = {"files": tables.FILES, "documents": tables.DOCUMENTS, "chunks": tables.CHUNKS}
            counts = {name: sum(1 for _ in snapshot.keys(table)) for name, table in counted.items()}
            profiles = [size for _, size in snapshot.sizes(tables.PROFILES)]
            parts, alone = list(snapshot.sizes(tables.STRETCHES)), count_alone(snapshot)
            live = snapshot.live_bytes()
        return {
            "uuid": self.uuid,
            "format": layout.FORMAT,
            "revision": revision,
            **counts,
            "tokens": sum(tokens.values()),
            "records": sum(level["records"] for level in levels.values()),
            "bytes": sum(level["bytes"] for level in levels.values()),
            "levels": dict(sorted(levels.items())),
            "profiles": {"count": len(profiles), "bytes": sum(profiles)},
            "stretches": {
                "count": sum(len(key) == ID_BYTES for key, _ in parts),
                "bytes": sum(size for _, size in parts),
                "alone": alone,
            },
            "file_bytes": self.environment.file_bytes(),
            "live_bytes": live,
            "free_bytes": self.environment.free_beside(live),
            "folder_bytes": space.folder_bytes(self.path),
            "budget": self.budget(),
            "pins": {name: len(rows) for name, rows in self.pins().items()},
            "disk_free": space.disk_free(self.path),
        }


def _revision_of(snapshot: Snapshot) -> int:
    data = snapshot.get(tables.META, keys.REVISION_KEY)
    with damage_of("the revision"):
        return 0 if data is None else keys.unseal_number(keys.REVISION_KEY, data)


def _json_of(snapshot: Snapshot, key: bytes, what: str) -> dict[str, Any]:
    payload = snapshot.payload(tables.META, key, Kind.MANIFEST, what)
    try:
        value = {} if payload is None else load_json(payload)
    except ValueError as error:
        raise DamagedError(f"{what} cannot be read") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{what} cannot be read")
    return value


def _add_row(total: dict[str, int], row: keys.LevelRow) -> None:
    for name, count in (("chunks", 1), ("records", row.layers), ("tokens", row.tokens), ("bytes", row.size)):
        total[name] = total.get(name, 0) + count
