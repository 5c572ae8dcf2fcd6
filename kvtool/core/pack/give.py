"""Store → pack: files with their documents, the chunks that they need, at some levels."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.progress import Events
from kvtool.core.errors import DamagedError, StoreNotFoundError, UsageError
from kvtool.core.pack import stretches
from kvtool.core.pack.container import PackWriter, writing
from kvtool.core.pack.names import CATALOGUE, HEAD, kv_member
from kvtool.core.pack.tensors import to_safetensors
from kvtool.core.remote import survey, values
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Level, chunk_name, digest_of, file_name
from kvtool.core.remote.head import Head, seal_head
from kvtool.core.remote.signing import SigningKey, seal_of
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.upkeep.selectors import named_documents


@dataclass(slots=True)
class ExportReport:
    """Report of an export: the contents of a pack.

    Attributes
    ----------
    chunks : at a level each. `stretches` : of answered prompts. `bytes` : of the file.
    damaged : entries that the store could not read, and why; they were left out.
    """

    path: str
    documents: int = 0
    files: int = 0
    chunks: int = 0
    stretches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


def export(
    path: Path,
    pack: Path,
    *,
    only: Sequence[str] = (),
    levels: Sequence[str] | None = None,
    force: bool = False,
    key: SigningKey | None = None,
    events: Events | None = None,
) -> ExportReport:
    """Write a store, or a part of it, into one file. At most one chunk at a level is held in memory.

    Parameters
    ----------
    only : documents (see `core/upkeep/selectors`); a file with several is taken whole. Empty: all.
    levels : of the KV, with the coarser ones that they refine; None: all. The prompt's beginning is taken as it is.
    force : replace a file that is there.
    key : signs the pack's catalogue, and with it all but states of answered prompts.

    Raises
    ------
    StoreNotFoundError : nothing was ever ingested.
    UsageError : a word of `only` means nothing, or the file is there already or lies in the store.
    NoSpaceError : the disk is full.
    """
    started, report = time.perf_counter(), ExportReport(str(pack))
    with Store.open(path) as store:
        identity = StoreIdentity.from_manifest(store.manifest())
        if identity is None:
            raise StoreNotFoundError(f"the store at {path} is empty", "run `kvtool ingest PATH` first")
        if pack.resolve().is_relative_to(path.resolve()):  # `force` would replace the store's own files
            raise UsageError(f"{pack} lies in the store's own folder", "name a file outside of it")
        entries = _chosen(store, only)
        with writing(pack, force) as out:
            _Export(store, identity, out, levels, report, events or Events(), key).run(entries)
    report.bytes, report.seconds = pack.stat().st_size, time.perf_counter() - started
    return report


def _chosen(store: Store, only: Sequence[str]) -> list[FileEntry]:
    entries = list(store.files())
    if not only:
        return entries
    sources = set(named_documents(store, only))
    return [entry for entry in entries if sources & {entry.path, *entry.documents}]


@dataclass(slots=True)
class _Export:
    store: Store
    identity: StoreIdentity
    out: PackWriter
    levels: Sequence[str] | None
    report: ExportReport
    events: Events
    key: SigningKey | None

    def run(self, entries: Sequence[FileEntry]) -> None:
        files, wanted = self._files(entries)
        chunks: dict[str, Chunk] = {}
        self.events.step("chunks", len(wanted) + 1, "chunks")
        for chunk_id in (self.identity.prefix_id, *wanted):
            with self._noting(f"chunk {chunk_id.hex()}"):
                self._chunk(chunk_id, chunks)
            self.events.advance(1)
        self._stretches(chunks)
        profiles = self._profiles(chunks)
        catalogue = Catalogue(self.store.manifest()["identity"], self._meta(), profiles, files, chunks)
        packed = catalogue.pack(self.key)
        self.out.add(CATALOGUE, packed)
        self.out.add(HEAD, seal_head(Head(digest_of(packed))))

    def _files(self, entries: Iterable[FileEntry]) -> tuple[dict[str, File], list[bytes]]:
        """Every file, and the chunks that its documents need, each once."""
        files: dict[str, File] = {}
        wanted: dict[bytes, None] = {}
        for entry in entries:
            with self._noting(entry.path):
                self._file(entry, files, wanted)
        return files, list(wanted)

    def _file(self, entry: FileEntry, files: dict[str, File], wanted: dict[bytes, None]) -> None:
        key, value = tables.name_key(entry.path), values.file_value(self.store, entry)
        _, documents = values.open_file(key, value)
        files[key.hex()] = File(digest_of(value), entry.mtime_ns, foreign=entry.origin.is_foreign)
        self.out.add(file_name(key.hex(), files[key.hex()]), value)
        wanted.update((ref.chunk_id, None) for document in documents for ref in document.chunks)
        self.report.files += 1
        self.report.documents += len(documents)

    def _chunk(self, chunk_id: bytes, chunks: dict[str, Chunk]) -> None:
        info = self.store.chunk_info(chunk_id)
        if info is None:
            if chunk_id == self.identity.prefix_id:  # an empty one has no record
                return
            raise DamagedError("its description is lost")
        key, value = chunk_id.hex(), values.chunk_value(chunk_id, info)
        foreign = self.store.origin(chunk_id).is_foreign
        described = chunks[key] = Chunk(digest_of(value), info.layers, {}, foreign=foreign)
        self.out.add(chunk_name(key, described), value)
        stored = self.store.levels(chunk_id)
        everything = self.levels is None or chunk_id == self.identity.prefix_id
        for level in stored if everything else [level for level in stored if level in (self.levels or ())]:
            with self._noting(f"chunk {key} at level {level}"):
                self._level(chunk_id, described, level)

    def _stretches(self, chunks: Collection[str]) -> None:
        for stretch, info in stretches.wanted(self.store, [bytes.fromhex(key) for key in chunks]).items():
            with self._noting(f"stretch {stretch.hex()}"):
                stretches.give(self.store, self.out, stretch, info)
                self.report.stretches += 1

    def _level(self, chunk_id: bytes, chunk: Chunk, level: str) -> None:
        """A level, behind the one that it refines."""
        if level in chunk.levels:
            return
        records = survey.records_of(self.store, chunk_id, level, chunk.layers)
        base = survey.base_of(chunk_id, level, records[0])
        if base is not None:
            self._level(chunk_id, chunk, base)
        maker = self.store.made_with(chunk_id, level)
        seal = None if self.key is None else seal_of(records)
        chunk.levels[level] = Level(sum(map(len, records)), survey.mark_of_records(records), base, maker, seal=seal)
        try:
            self.out.add(kv_member(chunk_id.hex(), chunk, level), to_safetensors(chunk_id, level, records))
        except DamagedError:
            del chunk.levels[level]
            raise
        self.report.chunks += 1

    def _profiles(self, chunks: dict[str, Chunk]) -> tuple[str, ...]:
        """The profiles that records or new records need."""
        named = {maker for chunk in chunks.values() for maker in chunk.makers.values()}
        named.add(str(self.store.codec_state().get("profile", "")))
        taken = [profile.hex() for profile in self.store.profile_digests() if profile.hex() in named]
        sound: list[str] = []
        for digest in taken:
            with self._noting(f"profile {digest}"):
                self.out.add(f"profile/{digest}", values.profile_value(self.store, digest))
                sound.append(digest)
        return tuple(sound)

    def _meta(self) -> dict[str, str]:
        meta = {name: values.meta_value(self.store, name) for name in values.META}
        for name, value in meta.items():
            self.out.add(f"meta/{name}-{digest_of(value)}", value)
        return {name: digest_of(value) for name, value in meta.items()}

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Leave out what is damaged in the store, and note it in the report."""
        try:
            yield
        except DamagedError as error:
            self.report.damaged.append({"what": what, "reason": error.message})
