"""A store's own values, by the names of a tier's blobs and a pack's members, for another store to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import part_name
from kvtool.core.errors import DamagedError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import ReadInTurn


class StoreBlobs:
    """Values of a store that stays as it is. See `remote/blobs.Readable` and `pack/stretches.Members`."""

    def __init__(self, store: Store) -> None:
        self.url = str(store.path)
        self._store = store
        self._makers: Mapping[str, Callable[[str], bytes | None]] = {
            "meta": lambda rest: values.meta_value(store, rest.rpartition("-")[0]),
            "profile": lambda rest: values.profile_value(store, rest),
            "file": self._file,
            "chunk": self._chunk,
            "kv": self._record,
            "stretch": self._stretch,
        }

    @property
    def names(self) -> Iterator[str]:
        """Yield the names of stretches: all other names are in a catalogue."""
        return (f"stretch/{stretch.hex()}" for stretch in self._store.stretches())

    def get(self, name: str, most: int) -> bytes | None:
        """A value, None where there is none, empty where it is damaged or larger than `most`."""
        kind, _, rest = name.partition("/")
        try:
            value = self._makers[kind](rest)
        except DamagedError:
            return b""
        return b"" if value is not None and len(value) > most else value

    def reader(self) -> ReadInTurn:
        """See Readable."""
        return ReadInTurn(lambda wanted: self.get(wanted.name, wanted.most))

    def _file(self, rest: str) -> bytes | None:
        entry = self._store.file_at(bytes.fromhex(rest.partition("-")[0]))
        return None if entry is None else values.file_value(self._store, entry)

    def _chunk(self, rest: str) -> bytes | None:
        chunk_id = bytes.fromhex(rest.partition("-")[0])
        info = self._store.chunk_info(chunk_id)
        return None if info is None else values.chunk_value(chunk_id, info)

    def _record(self, rest: str) -> bytes | None:
        key, level, layer = rest.split("/")
        place = tables.record_key(bytes.fromhex(key), level.rpartition("-")[0], int(layer))
        with self._store.snapshot() as snapshot:
            data = snapshot.get(tables.RECORDS, place)
            return None if data is None else bytes(data)

    def _stretch(self, rest: str) -> bytes | None:
        key, _, part = rest.partition("/")
        stretch = bytes.fromhex(key)
        if not part:
            return self._store.sealed_stretch(stretch)
        info = self._store.stretch(stretch)
        place = next((place for place in info.places if part_name(place) == part), None) if info else None
        return None if place is None else self._store.sealed_part(stretch, place)
