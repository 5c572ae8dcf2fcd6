"""Descriptions of files and chunks (documents with their text, token ids), stored in packs as their KV is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvtool.core.cache import tables
from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
from kvtool.core.remote import packing, values
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Pack, Place, digest_of
from kvtool.core.remote.packing import CHUNK, FILE, Member

_SMALL = 8  # is a pack of less than an eighth of what one may have
_MOST_SMALL = 16  # of a store


class Descriptions:
    """The descriptions of a store that its catalogue has no place for yet.

    Parameters
    ----------
    unsound : packs that are to be replaced.
    """

    def __init__(self, store: Store, mine: Catalogue, unsound: set[Pack]) -> None:
        self._store, self._mine = store, mine
        self.lacking = {(key, FILE) for key, file in mine.files.items() if _lacks(file, unsound)}
        self.lacking |= {(key, CHUNK) for key, chunk in mine.chunks.items() if _lacks(chunk, unsound)}

    def in_order(self) -> Iterator[Member]:
        """All that lack a place: chunks in the order in which documents have them, then files. Who lacks all of either
        asks once for them, and reads nothing of the other.

        Raises
        ------
        KvtoolError : one is in the store no more.
        """
        files, left = list[Member](), set(self.lacking)
        for entry in self._store.files() if any(kind == FILE for _, kind in left) else ():
            member = (tables.name_key(entry.path).hex(), FILE)
            if member in left:
                left.remove(member)
                files.append(member)
                for chunk in self._chunks_of(entry):
                    if chunk in left:
                        left.remove(chunk)
                        yield chunk
        if any(kind == FILE for _, kind in left):  # forgotten since; its chunks may be another file's, too
            raise changed()
        yield from sorted(left)
        yield from files

    def _chunks_of(self, entry: FileEntry) -> Iterator[Member]:
        for source in entry.documents:
            document = self._store.document(source)
            yield from ((ref.chunk_id.hex(), CHUNK) for ref in (document.chunks if document is not None else ()))

    def records_of(self, member: Member) -> list[bytes]:
        """The value of one. Raises KvtoolError where the store was changed since it was surveyed."""
        key, kind = member
        entry = self._mine.files[key] if kind == FILE else self._mine.chunks[key]
        value = self._file(key) if kind == FILE else self._chunk(key)
        if value is None or digest_of(value) != entry.mark:
            raise changed()
        return [value]

    def placed(self, places: Mapping[Member, Place]) -> Catalogue:
        """The catalogue with the places of what was sent."""
        files, chunks = dict(self._mine.files), dict(self._mine.chunks)
        for (key, kind), place in places.items():
            if kind == FILE:
                files[key] = replace(files[key], place=place)
            else:
                chunks[key] = replace(chunks[key], place=place)
        return self._mine.with_entries(files, chunks)

    def _file(self, key: str) -> bytes | None:
        entry = self._store.file_at(bytes.fromhex(key))
        return None if entry is None else values.file_value(self._store, entry)

    def _chunk(self, key: str) -> bytes | None:
        info = self._store.chunk_info(bytes.fromhex(key))
        return None if info is None else values.chunk_value(bytes.fromhex(key), info)


def scattered(mine: Catalogue) -> set[Pack]:
    """Small packs of descriptions, where many pushes of a little have left many: they are put together, so that who
    comes new asks for few. Each push of a little more costs no more than its share of that."""
    entries: tuple[File | Chunk, ...] = (*mine.files.values(), *mine.chunks.values())
    packs = {entry.place.pack for entry in entries if entry.place is not None}
    small = {pack for pack in packs if pack.size < packing.PACK_BYTES // _SMALL}
    return small if len(small) > _MOST_SMALL else set()


def _lacks(entry: File | Chunk, unsound: set[Pack]) -> bool:
    return entry.place is None or entry.place.pack in unsound


def changed() -> KvtoolError:
    """Return the error for a store that no longer holds what was found in it."""
    return KvtoolError("the store was changed meanwhile", "push again")
