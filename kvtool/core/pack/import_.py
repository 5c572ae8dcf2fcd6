"""Import of packs and of other stores, by the rules of a pull: every value is checked before it is stored."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.identity import HERE, ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import Place, StretchInfo, named_part, opened_info, opened_part, part_name
from kvtool.core.cache.writer import Writer
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.pack.container import CATALOGUE, MOST_HEADER, PackReader, from_safetensors, kv_member
from kvtool.core.remote import values
from kvtool.core.remote.blobs import SequentialReader
from kvtool.core.remote.catalogue import HEAD, Catalogue, digest_of, unseal_head
from kvtool.core.remote.pull import adopt
from kvtool.core.remote.report import TransferReport
from kvtool.core.remote.signing import Proof, Trust
from kvtool.core.remote.validation import MOST_BYTES, most_bytes

_SOURCES = "name folders of stores, or .kvpack files"
_AGAIN = "get the pack again, or export it again"
_SECONDS = 600.0  # for a value to come off the disk
_STRETCH = re.compile(rf"stretch/([0-9a-f]{{{2 * ID_BYTES}}})")
_MOST_INFO = 2**24


def import_sources(path: Path, sources: Sequence[Path], **options: Any) -> list[TransferReport]:
    """Import packs and other stores, as :func:`take` does; nothing is imported if one of them cannot be a source."""
    for source in sources:
        _check(path, source)
    return [take(path, source, **options) for source in sources]


def take(
    path: Path,
    place: Path,
    *,
    trust: Trust | None = None,
    lock_wait: float = 0.0,
    max_size: int | None = None,
    events: Events | None = None,
) -> TransferReport:
    """Import a pack or another store into a store, which is created if it is missing. Run again to resume.

    KV becomes durable in batches, then every document in a transaction of its own. Of a file in two versions the one
    changed last stays, unless the store has it of another origin. Damaged parts are left out, and named in the report.
    `trust` None: nobody, so that the store's own documents and their KV stay as they are; stores are never signed.

    Raises UsageError or StoreNotFoundError (no source: empty, or inside or around the store), UntrustedError,
    DamagedError, StoreFormatError, NoSpaceError, StoreLockedError. What came stays.
    """
    _check(path, place)
    trust = trust or Trust()
    with _opened(place) as source:
        origin = trust.origin(source.proof, os.path.realpath(place) if place.is_dir() else place.name)
        if isinstance(source, PackBlobs):
            source.check_manifest()
        with Store.create_or_open(path) as store, store.writer(lock_wait, max_size) as writer:
            try:
                report = adopt(
                    store, writer, source, source.catalogue, origin, None, newer=True, timeout=_SECONDS, events=events
                )
            except StoreFormatError as error:  # made with another model or other settings
                hint = f"import {place.name} into a store of its own: --store FOLDER"
                raise StoreFormatError(f"{error.message} than {place}", hint) from error
            report.direction, report.signer = "import", trust.signer(source.proof)
            if origin == HERE:  # no signature covers them, and they are parts of own documents' prompts, too
                _take_stretches(store, writer, source, report)
            return report


def _check(path: Path, source: Path) -> None:
    if source.is_file():
        return
    if not source.is_dir():
        raise UsageError(f"there is no store and no pack at {source}", _SOURCES)
    here, there = (Path(os.path.realpath(place)) for place in (path, source))
    if here == there:
        raise UsageError(f"{source} is the store to import into", "name others, or another --store")
    if here.is_relative_to(there):
        raise UsageError(f"the store to import into would be inside of {source}", "name another --store, next to it")
    if there.is_relative_to(here):
        raise UsageError(f"{source} is inside of the store to import into", "name another --store, next to it")
    try:
        opened = Store.open(source)
    except StoreNotFoundError as error:  # its own hint is for the store of --store
        raise StoreNotFoundError(error.message, _SOURCES) from None
    with opened as store:
        if not store.manifest():
            raise StoreNotFoundError(f"the store at {source} is empty", "run `kvtool ingest PATH` for it first")


@contextmanager
def _opened(place: Path) -> Iterator[PackBlobs | StoreBlobs]:
    if place.is_dir():
        with Store.open(place) as store, store.view():  # what is forgotten or replaced there meanwhile stays readable
            yield StoreBlobs(store)
    else:
        with closing(PackReader(place)) as reader:
            yield PackBlobs(reader)


# ---- stretches: states of answered prompts, one a value; a catalogue does not name them --------------------------


def _take_stretches(store: Store, writer: Writer, source: PackBlobs | StoreBlobs, report: TransferReport) -> None:
    chunks = {*store.chunk_ids()}
    for stretch in [bytes.fromhex(found[1]) for name in source.names if (found := _STRETCH.fullmatch(name))]:
        try:
            info = opened_info(stretch, source.get(f"stretch/{stretch.hex()}", _MOST_INFO) or b"")
            if chunks.issuperset(info.chunks) and not _is_here(store, stretch, info):
                parts = [(place, _part(source, stretch, place)) for place in info.places]
                writer.put_stretch(stretch, info, parts)
                report.bytes += sum(len(payload) for _, payload in parts)
        except DamagedError as error:
            report.note_damage(f"state checkpoint {stretch.hex()}", error.message)


def _is_here(store: Store, stretch: bytes, info: StretchInfo) -> bool:
    try:
        here = store.stretch(stretch)
    except DamagedError:  # a sound one takes its place
        return False
    return here is not None and len(here.states) >= len(info.states)


def _part(source: PackBlobs | StoreBlobs, stretch: bytes, place: Place) -> bytes:
    value = source.get(f"stretch/{stretch.hex()}/{part_name(place)}", MOST_BYTES)
    if not value:
        raise DamagedError(f"the {named_part(place)} are missing")
    return bytes(opened_part(stretch, place, value))


# ---- sources -----------------------------------------------------------------------------------------------------


class PackBlobs:
    """A pack's members by the names of a shared store's values. Raises UsageError, DamagedError, StoreFormatError."""

    def __init__(self, pack: PackReader) -> None:
        if not {HEAD, CATALOGUE} & {*pack.names}:  # of a pack one of them may be damaged
            raise UsageError(f"{pack.path} is an archive, but no pack", "name a file that `kvtool store export` wrote")
        self.url, self.names, self._pack = str(pack.path), pack.names, pack
        self._member = ""  # whose records were read last: a chunk's layers are asked for one after the other
        self._records: Mapping[str, bytes] = {}
        with self._of_the_index():
            head = unseal_head(pack.get(HEAD, most_bytes(HEAD)) or b"")
            packed = pack.get(CATALOGUE, most_bytes(CATALOGUE)) or b""
            if digest_of(packed) != head.catalogue:
                raise DamagedError("its catalogue is another one")
            self.catalogue = Catalogue.unpack(packed)
        self.proof = self.catalogue.proof

    def check_manifest(self) -> None:
        with self._of_the_index():
            name = f"meta/manifest-{self.catalogue.meta.get('manifest', '')}"
            value = self.get(name, most_bytes(name))
            if value is None or not values.is_sound(name, value):
                raise DamagedError("it does not say what it was made with")
            if values.open_meta("manifest", value).get("identity") != self.catalogue.identity:
                raise DamagedError("it was made with something else than its index says")

    @contextmanager
    def _of_the_index(self) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            raise DamagedError(f"the index of {self.url} is damaged: nothing was taken from it", _AGAIN) from error
        except StoreFormatError as error:
            raise StoreFormatError(f"{self.url}: {error.message}", "export the store again") from error

    def get(self, name: str, most: int) -> bytes | None:
        if not name.startswith("kv/"):
            return self._pack.get(name, min(most, most_bytes(name)))
        record = self._record(name)
        return b"" if record is not None and len(record) > most else record

    def _record(self, name: str) -> bytes | None:
        _, key, rest, _ = name.split("/")
        level, chunk = rest.rpartition("-")[0], self.catalogue.chunks[key]
        member = kv_member(key, level, chunk.levels[level].mark)
        if member != self._member:
            self._member, self._records = member, {}
            most = chunk.levels[level].size + min(MOST_HEADER, 2**10 * chunk.layers + 2**12)
            data = self._pack.get(member, most)
            if data is None:
                return None
            try:
                records = from_safetensors(bytes.fromhex(key), level, chunk.layers, data)
            except DamagedError:
                records = []
            stem = name.rpartition("/")[0]
            self._records = {f"{stem}/{layer}": record for layer, record in enumerate(records)}
        elif not self._records and not self._pack.size(member):
            return None
        return self._records.get(name, b"")

    def reader(self) -> SequentialReader:
        return SequentialReader(lambda wanted: self.get(wanted.name, wanted.most))


class StoreBlobs:
    proof: Proof | None = None  # stores are never signed

    def __init__(self, store: Store) -> None:
        self.url, self._store = str(store.path), store

    @cached_property
    def catalogue(self) -> Catalogue:
        """Build the catalogue, for which all KV is read: not before the import has its lock."""
        lost: list[tuple[str, str]] = []
        surveyed = values.survey(self._store, None, lambda what, why: lost.append((what, why)))
        return replace(surveyed, left_out=tuple(lost))

    @property
    def names(self) -> Iterator[str]:
        return (f"stretch/{stretch.hex()}" for stretch in self._store.stretches())

    def get(self, name: str, most: int) -> bytes | None:
        kind, _, rest = name.partition("/")
        try:
            read = {"kv": self._record, "stretch": self._stretch}.get(kind)
            value = read(rest) if read is not None else values.value_of(self._store, name)
        except DamagedError:
            return b""
        return b"" if value is not None and len(value) > most else value

    def reader(self) -> SequentialReader:
        return SequentialReader(lambda wanted: self.get(wanted.name, wanted.most))

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
