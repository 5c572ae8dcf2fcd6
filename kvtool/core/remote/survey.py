"""Catalogue of a local store: its files, chunks and levels with their marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvtool.core.cache import tables
from kvtool.core.cache.chunks import read_record
from kvtool.core.cache.entries import layers_in
from kvtool.core.cache.record import DIGEST_BYTES, Kind, decode_record, unseal
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import base_level, check_of, level_of, nested, stated_check
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.remote import values
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Level, digest_of
from kvtool.core.remote.signing import seal_of

Damaged = Callable[[str, str], None]  # what, why
_Described = TypeVar("_Described", File, Chunk)
_T = TypeVar("_T")
_AT_ONCE = 256  # chunks or files


def records_of(store: Store, chunk_id: bytes, level: str, layers: int) -> list[bytes]:
    """All records of a chunk at a level as they stand in the store's folder; raises DamagedError."""
    records = []
    with store.snapshot() as snapshot:
        for layer in range(layers):
            data = snapshot.get(tables.RECORDS, tables.record_key(chunk_id, level, layer))
            if data is None:
                raise DamagedError(f"layer {layer} is not stored")
            checked = read_record(chunk_id, level, layer, data)
            if isinstance(checked, KvtoolError):
                raise checked
            records.append(bytes(data))
    return records


def mark_of_records(records: Sequence[bytes]) -> str:
    """Digest of all records of a level, from their own."""
    return digest_of(b"".join(record[-DIGEST_BYTES:] for record in records))


def base_of(chunk_id: bytes, level: str, record: bytes) -> str | None:
    """The coarser level that a record refines; raises DamagedError."""
    return base_level(level, decode_record(chunk_id, record)[1])


def stored_base(store: Store, chunk_id: bytes, level: str) -> str | None:
    """The coarser level that a stored one refines; None: none, or its record cannot be read."""
    try:
        record = store.read_kv(chunk_id, level, 0)
        return base_level(level, record[1]) if record is not None else None
    except DamagedError:
        return None


def check_level(chunk_id: bytes, chunk: Chunk, level: str, records: Sequence[bytes], sealed: bool = False) -> None:
    """Raises DamagedError where the records of a level are not those that a catalogue means.

    Parameters
    ----------
    sealed : the catalogue's signature has to cover them.
    """
    meant = chunk.levels[level]
    if sealed and meant.seal != seal_of(records):
        raise DamagedError("the signature does not cover these records")
    if mark_of_records(records) != meant.mark or sum(map(len, records)) != meant.size:
        raise DamagedError("these are not the records that the catalogue names")
    if any(base_of(chunk_id, level, record) != meant.base for record in records):
        raise DamagedError("they refine another level than the catalogue says")


def holds_level(store: Store, chunk_id: bytes, chunk: Chunk, level: str) -> bool:
    """Return True if a store's records of a level are sound, and the ones that a catalogue describes."""
    try:
        return mark_of_records(records_of(store, chunk_id, level, chunk.layers)) == chunk.levels[level].mark
    except DamagedError:
        return False


def survey(store: Store, known: Catalogue | None, damaged: Damaged, sealed: bool = False) -> Catalogue:
    """Build the catalogue of a store. KV is read only where `known` does not give its mark.

    Parameters
    ----------
    known : of the shared store: a level of the same size counts as the same, unless another lossy one differs.
    damaged : called with what cannot be sent.
    sealed : for a signature: a level that has no seal in `known` is read.
    """
    files = _survey_files(store, known.files if known is not None else {}, damaged)
    chunks = _survey_chunks(store, known.chunks if known is not None else {}, damaged, sealed)
    meta = {name: digest_of(values.meta_value(store, name)) for name in values.META}
    profiles = tuple(digest.hex() for digest in store.profile_digests())
    return Catalogue(store.manifest().get("identity", {}), meta, profiles, files, chunks)


def _survey_files(store: Store, known: Mapping[str, File], damaged: Damaged) -> dict[str, File]:
    files = dict[str, File]()
    named = sorted((tables.name_key(entry.path), entry) for entry in store.files())  # documents stand in that order
    for name, entry in _in_views(store, named):
        try:
            file = File(digest_of(values.file_value(store, entry)), entry.mtime_ns, foreign=entry.origin.is_foreign)
            files[name.hex()] = _as_known(file, known.get(name.hex()))
        except DamagedError as error:
            damaged(entry.path, error.message)
    return files


def _survey_chunks(store: Store, known: Mapping[str, Chunk], damaged: Damaged, sealed: bool) -> dict[str, Chunk]:
    chunks, foreign = dict[str, Chunk](), store.foreign_chunks()
    for chunk_id in _in_views(store, store.chunk_ids()):
        key = chunk_id.hex()
        try:
            chunk = survey_chunk(store, chunk_id, known.get(key), damaged, sealed, chunk_id in foreign)
        except DamagedError as error:
            damaged(f"chunk {key}", error.message)
        else:
            if chunk is not None:
                chunks[key] = chunk
    return chunks


def _in_views(store: Store, items: Sequence[_T]) -> Iterator[_T]:
    """Items; what is read of the store until the next one is asked for is read in a view of some. A view of all would
    hold on to all that a writer replaces meanwhile."""
    for at in range(0, len(items), _AT_ONCE):
        with store.view():
            yield from items[at : at + _AT_ONCE]


def survey_chunk(
    store: Store, chunk_id: bytes, known_chunk: Chunk | None, damaged: Damaged, sealed: bool, foreign: bool
) -> Chunk | None:
    """Describe one chunk; None if the store does not describe it. `known_chunk` is its entry in `known`; `foreign`: it
    was made by somebody else. Raises DamagedError."""
    data = store.sealed_info(chunk_id)
    if data is None:
        return None
    if known_chunk is not None and known_chunk.foreign != foreign:
        if foreign:
            return known_chunk  # to what was made by who pushed it nothing of others is added
        known_chunk = None  # records of one size need not be the same ones: those are somebody else's
    mark, layers = digest_of(data), layers_in(unseal(chunk_id, Kind.CHUNK, data))  # such is its value, byte for byte
    sizes = store.level_sizes(chunk_id)
    known = known_chunk.levels if known_chunk is not None else {}
    same = {level: known[level] for level, size in sizes.items() if level in known and known[level].size == size}
    if sealed:
        same = {level: stored for level, stored in same.items() if stored.seal is not None}
    if not same.keys() >= {*nested(sizes)}:  # a refinement belongs to just this base: none may be taken on trust
        same = {level: stored for level, stored in same.items() if not level_of(level).nested}
    levels = {}
    for level, size in sizes.items():
        try:
            stored = same.get(level) or _survey_level(store, chunk_id, level, layers, size, sealed)
            maker = store.made_with(chunk_id, level)
            levels[level] = stored if stored.maker == maker else replace(stored, maker=maker)
        except DamagedError as error:
            damaged(f"chunk {chunk_id.hex()} at level {level}", error.message)
    return _as_known(Chunk(mark, layers, levels, foreign=foreign), known_chunk)


def _as_known(mine: _Described, known: _Described | None) -> _Described:
    """The very entry of the tier where it is the same, so that a million of them are there once; else with the place of
    the tier's description, where that is the same. What came from the tier is of the one who put it there; what was
    made here is not somebody else's because he had pushed the same."""
    if known is None or known.mark != mine.mark:
        return mine
    placed = replace(mine, place=known.place, foreign=mine.foreign and known.foreign)
    return known if placed == known else placed


def _survey_level(store: Store, chunk_id: bytes, level: str, layers: int, size: int, sealed: bool) -> Level:
    records = records_of(store, chunk_id, level, layers)
    base = base_of(chunk_id, level, records[0])
    if base is not None:
        for record, refined in zip(records, records_of(store, chunk_id, base, layers), strict=True):
            check, other = (decode_record(chunk_id, data)[1] for data in (record, refined))
            if stated_check(check) not in (0, check_of([other])):
                raise DamagedError(f"it refines another record of level {base} than is stored")
    return Level(size, mark_of_records(records), base, seal=seal_of(records) if sealed else None)


def is_complete(store: Store, mine: Catalogue) -> bool:
    """Return True if the store's catalogue has all chunks of its documents."""
    return all(ref.chunk_id.hex() in mine.chunks for document in store.documents() for ref in document.chunks)
