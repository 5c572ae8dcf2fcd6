"""Packs: a shared store in one file, a zip whose members are stored uncompressed under the names of the values.

An export is a push into a pack, which also takes state checkpoints. An import of a pack, or of another store, is a
pull: every value is checked before it is stored."""

from __future__ import annotations

import os
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.identity import HERE, ID_BYTES
from kvtool.core.cache.layout import sync_folder
from kvtool.core.cache.options import StoreOptions
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import Place, StretchInfo, named_part, opened_info, opened_part, part_name
from kvtool.core.cache.writer import Writer
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Backend, PrivateBlobs, most_bytes
from kvtool.core.remote.catalogue import HEAD, Catalogue, Proof
from kvtool.core.remote.catalogue_io import read_head
from kvtool.core.remote.folder import FULL, read_at, temporary_name
from kvtool.core.remote.options import ExportOptions, ImportOptions, PushOptions, TransferReport
from kvtool.core.remote.pull import Origins, PullJob
from kvtool.core.remote.push import push
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.upkeep.documents import named_documents

_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every member: the same content is the same file
_MOST_OFFSET = 2**62
_BROKEN = (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, ValueError, LookupError, EOFError)


class ArchiveBlobs(PrivateBlobs):
    """Values are the members of an archive; see Blobs. No name is ever a path: nothing is unpacked."""

    def __init__(self, path: Path, file: IO[bytes], archive: zipfile.ZipFile) -> None:
        self.url, self._file, self._archive = str(path), file, archive

    def sizes(self, names: Sequence[str]) -> list[int]:
        members = map(self._member, names)
        return [0 if member is None else member.file_size for member in members]

    def put(self, values: Mapping[str, bytes]) -> None:
        for name, value in values.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.external_attr = 0o600 << 16
            self._archive.writestr(member, value)

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        if before is not None or self._member(name) is not None:
            return False
        self.put({name: after})
        return True

    def names(self, below: str = "") -> Iterator[str]:
        return (name for name in self._archive.namelist() if name.startswith(below))

    def _member(self, name: str) -> zipfile.ZipInfo | None:
        with suppress(KeyError):
            return self._archive.getinfo(name)
        return None

    def _read(self, wanted: BlobRequest) -> bytes | None:
        """Read a value or a part of one; empty if its member is compressed, too large, or not what the archive's
        directory says. Its bytes are not checked here: values have digests."""
        member = self._member(wanted.pack or wanted.name)
        if member is None:
            return None
        start, size = (wanted.start, wanted.most) if wanted.pack else (0, member.file_size)
        is_stored = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        if not is_stored or not 0 <= member.header_offset <= _MOST_OFFSET:
            return b""
        if not wanted.pack and size > min(wanted.most, most_bytes(wanted.name)):
            return b""
        try:
            header = member.FileHeader()
            if read_at(self._file.fileno(), member.header_offset, len(header)) != header:
                return b""
            at = member.header_offset + len(header) + start
            return read_at(self._file.fileno(), at, min(size, member.file_size - start))
        except struct.error:  # of a header that cannot be
            return b""
        except OSError as error:
            raise KvtoolError(f"{self.url} cannot be read: {error.strerror or error}", "check the disk") from error


@contextmanager
def opened_archive(path: Path) -> Iterator[ArchiveBlobs]:
    """Open a pack to be read. Raises UsageError for what is no pack, DamagedError for a part of one."""
    with _opened(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except _BROKEN as error:
            raise DamagedError(f"{path} is no pack, or is cut off: {error}", "get the pack again") from error
        with archive:
            if not any(name == HEAD or name.startswith("catalogue/") for name in archive.namelist()):
                raise UsageError(f"{path} is an archive, but no pack", "name a file that `kvtool store export` wrote")
            yield ArchiveBlobs(path, file, archive)


def _opened(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():  # nor a FIFO, which would hang
            raise UsageError(f"there is no pack at {path}", "name a file that `kvtool store export` wrote")
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check who owns it") from error


@contextmanager
def written_archive(path: Path, force: bool) -> Iterator[ArchiveBlobs]:
    """Open a new pack to be written. The file appears at `path` when all of it is durable, or never. Raises UsageError
    for a path that cannot be written, NoSpaceError."""
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already", "name another file, or replace it with --force")
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):  # of /dev/null nothing else is to be made
        raise UsageError(f"{path} is no file", "name another file: only a file is replaced")
    temporary = path.with_name(temporary_name())
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                yield ArchiveBlobs(path, file, archive)
            file.flush()
            os.fsync(file.fileno())
        _name(temporary, path, force)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in FULL:
            raise NoSpaceError(f"no space to write {path}", "free some disk space, or name another disk") from error
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be written: {reason}", "name a file in a folder that is yours") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path, force: bool) -> None:
    """Give the file its name; without `force` never that of a file that came there meanwhile."""
    if not force:
        try:
            os.link(temporary, path)
            return
        except FileExistsError:
            raise UsageError(f"{path} is there already", "name another file, or replace it with --force") from None
        except OSError:  # a file system without links
            pass
    temporary.replace(path)


_EXPORT = ExportOptions()


@dataclass(slots=True)
class ExportReport:
    """What a pack holds: chunks at a level each, `checkpoints` of answered prompts, `bytes` of its file. Entries the
    store could not read are `damaged`: they were left out."""

    path: str
    documents: int = 0
    files: int = 0
    chunks: int = 0
    checkpoints: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def export(
    path: Path,
    pack: Path,
    options: ExportOptions = _EXPORT,
    events: Events | None = None,
) -> ExportReport:
    """Write a store, or a part of it, into one file. A file with several documents is taken whole. A signature covers
    all but states of answered prompts.

    Raises UsageError: a word of `only` means nothing, or the file is there already or is in the store.
    """
    started = time.perf_counter()
    with Store.open(path) as store, store.view():
        identity = StoreIdentity.from_manifest(store.manifest())
        if identity is None:
            raise StoreNotFoundError(f"the store at {path} is empty", "run `kvtool ingest PATH` first")
        if pack.resolve().is_relative_to(path.resolve()):  # `force` would replace the store's own files
            raise UsageError(f"{pack} is inside the store's own folder", "name a file outside of it")
        files = _files(store, options.only)
        chunks = dict.fromkeys([identity.prefix_id, *values.chunks_of(store, files)])
        with written_archive(pack, options.force) as blobs:
            part = values.Part(files, [*chunks], identity.prefix_id, options.levels or None)
            sent = push(store, blobs, PushOptions(sign=options.sign), events=events, part=part)
            checkpoints = _put_checkpoints(store, blobs, {*chunks}, sent)
    lost = {row["subject"] for row in sent.damaged}
    documents = sum(len(entry.documents) for entry in files if entry.path not in lost)
    counts = documents, sent.files.transferred, sent.chunks.transferred, checkpoints, pack.stat().st_size
    return ExportReport(str(pack), *counts, time.perf_counter() - started, sent.damaged)


def _files(store: Store, only: Sequence[str]) -> list[FileEntry]:
    entries = list(store.files())
    if not only:
        return entries
    sources = {*named_documents(store, only)}
    return [entry for entry in entries if sources & {entry.path, *entry.documents}]


def _put_checkpoints(store: Store, blobs: ArchiveBlobs, chunks: set[bytes], report: TransferReport) -> int:
    """Write the states of prompts that consist of these chunks only, after the store's own instruction."""
    count = 0
    for stretch, info in sorted(store.stretches().items()):
        if info.own and chunks.issuperset(info.chunks):
            name = f"stretch/{stretch.hex()}"
            try:
                names = [name, *(f"{name}/{part_name(place)}" for place in info.places)]
                blobs.put({name: values.value_of(store, name) or b"" for name in names})
                count += 1
            except DamagedError as error:
                report.note_damage(f"state checkpoint {stretch.hex()}", error.message)
    return count


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
