"""Import of packs and of other stores, by the rules of a pull: every value is checked before it is stored."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.identity import HERE, ID_BYTES
from kvtool.core.cache.options import StoreOptions
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import Place, StretchInfo, named_part, opened_info, opened_part, part_name
from kvtool.core.cache.writer import Writer
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.archive import ArchiveBlobs, opened_archive
from kvtool.core.remote.blobs import Backend
from kvtool.core.remote.catalogue import Catalogue, Proof
from kvtool.core.remote.catalogue_io import read_head
from kvtool.core.remote.options import ImportOptions
from kvtool.core.remote.pull import PullJob
from kvtool.core.remote.report import TransferReport
from kvtool.core.remote.selection import Origins

_IMPORT = ImportOptions()
_SOURCES = "name folders of stores, or .kvpack files"
_MOST_CATALOGUE = 2**29  # bytes of JSON: a small pack does not unpack to gigabytes
_SECONDS = 600.0  # for a value to come off the disk
_STRETCH = re.compile(rf"stretch/([0-9a-f]{{{2 * ID_BYTES}}})")


def import_sources(
    path: Path,
    sources: Sequence[Path],
    options: ImportOptions = _IMPORT,
    store: StoreOptions | None = None,
    events: Events | None = None,
) -> list[TransferReport]:
    """Import packs and other stores, as :func:`take` does; nothing is imported if one of them cannot be a source."""
    for source in sources:
        _check(path, source)
    return [take(path, source, options, store, events) for source in sources]


def take(
    path: Path,
    place: Path,
    options: ImportOptions = _IMPORT,
    store: StoreOptions | None = None,
    events: Events | None = None,
) -> TransferReport:
    """Import a pack or another store into a store, which is created if it is missing. Run again to resume.

    KV becomes durable in batches, then every document in a transaction of its own. Of a file in two versions the one
    changed last stays, unless the store has it of another origin. Damaged parts are left out, and named in the report.
    Where nobody is trusted, the store's own documents and their KV stay as they are; stores are never signed.

    Raises UsageError or StoreNotFoundError (no source: empty, or inside or around the store), UntrustedError,
    DamagedError, StoreFormatError, NoSpaceError, StoreLockedError. What came stays.
    """
    _check(path, place)
    started = time.perf_counter()
    with _opened_source(place) as (source, proof, catalogue):
        report = TransferReport("import", source.url)
        name = place.name if place.is_file() else os.path.realpath(place)
        origin = report.judge(options.trusted(store), proof, name)
        with Store.create_or_open(path) as local, local.writer(options.lock_wait, options.max_size) as writer:
            try:
                origins = Origins(origin, source.url)
                PullJob(local, writer, source, origins, report, _SECONDS, events).run(catalogue(), None, newer=True)
            except StoreFormatError as error:  # made with another model or other settings
                hint = f"import {place.name} into a store of its own: --store FOLDER"
                raise StoreFormatError(f"{error.message} than {place}", hint) from error
            if origin == HERE:  # no signature covers them, and they are parts of own documents' prompts, too
                _take_checkpoints(local, writer, source, report)
    report.seconds = time.perf_counter() - started
    return report


def _check(path: Path, source: Path) -> None:
    if source.is_file():
        return
    if not source.is_dir():
        raise UsageError(f"there is no store and no pack at {source}", _SOURCES)
    here, there = (Path(os.path.realpath(place)) for place in (path, source))
    if here.is_relative_to(there) or there.is_relative_to(here):
        what = "is" if here == there else "contains or is part of"
        raise UsageError(f"{source} {what} the store to import into", "name another --store, next to it")
    try:
        opened = Store.open(source)
    except StoreNotFoundError as error:  # its own hint is for the store of --store
        raise StoreNotFoundError(error.message, _SOURCES) from None
    with opened as store:
        if not store.manifest():
            raise StoreNotFoundError(f"the store at {source} is empty", "run `kvtool ingest PATH` for it first")


class StoreBlobs(Backend):
    """Another store's values, by the names of a shared store's; a catalogue is made of it for one import."""

    def __init__(self, store: Store) -> None:
        self.url, self._store = str(store.path), store

    def survey(self) -> Catalogue:
        """Build the catalogue, for which all KV is read: not before the import has its lock."""
        lost: list[tuple[str, str]] = []
        catalogue = values.Survey(self._store, lambda what, why: lost.append((what, why))).catalogue()
        return replace(catalogue, left_out=tuple(lost))

    def names(self, below: str) -> Iterator[str]:
        return (f"{below}{stretch.hex()}" for stretch in self._store.stretches())

    def _read(self, wanted: BlobRequest) -> bytes | None:
        try:
            return values.value_of(self._store, wanted.name)
        except DamagedError:
            return b""


Source = ArchiveBlobs | StoreBlobs


@contextmanager
def _opened_source(place: Path) -> Iterator[tuple[Source, Proof | None, Callable[[], Catalogue]]]:
    """Open a source. Yields it with its signature and its catalogue, which for a store is not made yet."""
    if place.is_dir():
        with Store.open(place) as store, store.view():  # what is forgotten or replaced there meanwhile stays readable
            source = StoreBlobs(store)
            yield source, None, source.survey
    else:
        with opened_archive(place) as archive:
            catalogue = read_index(archive)
            yield archive, catalogue.proof, lambda: catalogue


def read_index(pack: ArchiveBlobs) -> Catalogue:
    """Read what decides whether anything is imported from a pack. Raises DamagedError, StoreFormatError."""
    try:
        _, catalogue = read_head(pack, most=_MOST_CATALOGUE)
        name = f"meta/manifest-{catalogue.meta.get('manifest', '')}"
        (value,) = pack.get([name])
        if value is None or not values.is_sound(name, value):
            raise DamagedError("its settings are missing")
        if values.open_meta("manifest", value).get("identity") != catalogue.identity:
            raise DamagedError("its settings are not those of its catalogue")
        return catalogue
    except (DamagedError, StoreNotFoundError) as error:
        hint = "get the pack again, or export it again"
        raise DamagedError(f"the index of {pack.url} is damaged: nothing was taken from it", hint) from error
    except StoreFormatError as error:
        raise StoreFormatError(f"{pack.url}: {error.message}", "export the store again") from error


# ---- state checkpoints of answered prompts: a catalogue does not name them ---------------------------------------


def _take_checkpoints(store: Store, writer: Writer, source: Source, report: TransferReport) -> None:
    chunks = {*store.chunk_ids()}
    names = [name for name in source.names("stretch/") if _STRETCH.fullmatch(name)]
    for name in names:
        stretch = bytes.fromhex(name.removeprefix("stretch/"))
        try:
            info = opened_info(stretch, source.get([name])[0] or b"")
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


def _part(source: Source, stretch: bytes, place: Place) -> bytes:
    (value,) = source.get([f"stretch/{stretch.hex()}/{part_name(place)}"])
    if not value:
        raise DamagedError(f"the {named_part(place)} are missing")
    return bytes(opened_part(stretch, place, value))
