"""Records of chunks put together into packs: some megabytes of one level in one value, a document's side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Pack, Place, digest_of

PACK_BYTES = 8 * 2**20  # of a pack; one chunk that is larger has a pack of its own
MOST_BYTES = 2**28  # of a level in a pack: Redis keeps no value of more than 512 MB. What is larger is sent by layer
_LEAST_USED = 0.5  # of a pack: below that, what is still used of it is packed anew

Member = tuple[str, str]  # key of a chunk or a file in hex, level or FILE or CHUNK
FILE, CHUNK = "/file", "/chunk"  # in a level's place: the description of one


@dataclass(slots=True)
class Packed:
    """A pack that is made.

    Attributes
    ----------
    places : where in it each member stands.
    """

    value: bytes
    pack: Pack
    places: dict[Member, Place]


@dataclass(slots=True)
class _Open:
    """A pack to which records are still added."""

    records: list[bytes] = field(default_factory=list)
    lengths: dict[Member, tuple[int, ...]] = field(default_factory=dict)
    size: int = 0

    def add(self, member: Member, records: list[bytes]) -> None:
        self.records += records
        self.lengths[member] = tuple(map(len, records))
        self.size += sum(self.lengths[member])

    def close(self) -> Packed:
        value = b"".join(self.records)
        pack, places, start = Pack(digest_of(value), len(value)), dict[Member, Place](), 0
        for member, lengths in self.lengths.items():
            places[member] = Place(pack, start, lengths)
            start += sum(lengths)
        return Packed(value, pack, places)


def packs_of(members: Iterable[Member], records_of: Callable[[Member], list[bytes] | None]) -> Iterator[Packed]:
    """Packs of the records of some members, in their order. The same members and records make the same packs.

    Parameters
    ----------
    members : all of one level.
    records_of : a member's records, layer by layer; None: it is left out.
    """
    filling = _Open()
    for member in members:
        records = records_of(member)
        if records is None:
            continue
        if filling.size and filling.size + sum(map(len, records)) > PACK_BYTES:
            yield filling.close()
            filling = _Open()
        filling.add(member, records)
    if filling.size:
        yield filling.close()


def by_document(store: Store, chunks: Iterable[str]) -> list[str]:
    """Chunks in the order in which documents have them, each where it comes first; then those that none has."""
    order: dict[str, None] = {}
    wanted = dict.fromkeys(chunks)
    for source in store.sources():
        if len(order) == len(wanted):  # of a change: the others are not read
            break
        with suppress(DamagedError):  # told elsewhere
            document = store.document(source)
            ids = (ref.chunk_id.hex() for ref in (document.chunks if document is not None else ()))
            order |= {key: None for key in ids if key in wanted}
    return [*{**order, **wanted}]


def thin_packs(mine: Catalogue, theirs: Catalogue) -> set[Pack]:
    """Packs of which not even half is used any more, by either catalogue."""
    used: Counter[Pack] = Counter()
    for place in _places_of(theirs.files, theirs.chunks):
        used[place.pack] += sum(place.lengths)
    files = {key: file for key, file in mine.files.items() if theirs.files.get(key) is not file}
    chunks = {key: chunk for key, chunk in mine.chunks.items() if theirs.chunks.get(key) is not chunk}
    known = {key: theirs.files[key] for key in files.keys() & theirs.files.keys()}
    there = {*_places_of(known, {key: theirs.chunks[key] for key in chunks.keys() & theirs.chunks.keys()})}
    for place in {*_places_of(files, chunks)} - there:
        used[place.pack] += sum(place.lengths)
    return {pack for pack, size in used.items() if size < _LEAST_USED * pack.size}


def _places_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> Iterator[Place]:
    """Yield the places in packs of all descriptions and records."""
    for file in files.values():
        if file.place is not None:
            yield file.place
    for chunk in chunks.values():
        if chunk.place is not None:
            yield chunk.place
        yield from (level.place for level in chunk.levels.values() if level.place is not None)
