"""Export of a store, or a part of it, to a pack: files with their documents, and their chunks at some levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import part_name
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, StoreNotFoundError, UsageError
from kvtool.core.pack.container import CATALOGUE, kv_member, to_safetensors, writing
from kvtool.core.remote import values
from kvtool.core.remote.catalogue import HEAD, Catalogue, Chunk, File, Head, chunk_name, digest_of, seal_head
from kvtool.core.remote.signing import SigningKey
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.upkeep.selectors import named_documents


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
    *,
    only: Sequence[str] = (),
    levels: Sequence[str] | None = None,
    force: bool = False,
    key: SigningKey | None = None,
    events: Events | None = None,
) -> ExportReport:
    """Write a store, or a part of it, into one file. At most one chunk at two levels is held in memory.

    `only`: documents (see `core/upkeep/selectors`); a file with several is taken whole; empty: all. `levels`: of the
    KV, with those that they refine; None: all. `key` signs the catalogue, and with it all but states of answered
    prompts. Raises UsageError: a word of `only` means nothing, or the file is there already or is in the store.
    """
    started, report = time.perf_counter(), ExportReport(str(pack))
    with Store.open(path) as store:
        identity = StoreIdentity.from_manifest(store.manifest())
        if identity is None:
            raise StoreNotFoundError(f"the store at {path} is empty", "run `kvtool ingest PATH` first")
        if pack.resolve().is_relative_to(path.resolve()):  # `force` would replace the store's own files
            raise UsageError(f"{pack} is inside the store's own folder", "name a file outside of it")
        entries = list(store.files())
        if only:
            sources = {*named_documents(store, only)}
            entries = [entry for entry in entries if sources & {entry.path, *entry.documents}]
        with writing(pack, force) as write:
            _Export(store, identity, write, levels, report, events or Events(), key).run(entries)
    report.bytes, report.seconds = pack.stat().st_size, time.perf_counter() - started
    return report


@dataclass(slots=True)
class _Export:
    store: Store
    identity: StoreIdentity
    write: Callable[[str, bytes], None]
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
        self._stretches({*map(bytes.fromhex, chunks)})
        meta = {name: self._add(f"meta/{name}-{{}}", values.meta_value(self.store, name)) for name in values.META}
        catalogue = Catalogue(self.store.manifest()["identity"], meta, self._profiles(chunks), files, chunks)
        packed = catalogue.pack(self.key)
        self.write(CATALOGUE, packed)
        self.write(HEAD, seal_head(Head(digest_of(packed))))

    def _add(self, name: str, value: bytes) -> str:
        mark = digest_of(value)
        self.write(name.format(mark), value)
        return mark

    def _files(self, entries: Iterable[FileEntry]) -> tuple[dict[str, File], list[bytes]]:
        files: dict[str, File] = {}
        wanted: dict[bytes, None] = {}
        for entry in entries:
            with self._noting(entry.path):
                key, value = tables.name_key(entry.path), values.file_value(self.store, entry)
                _, documents = values.open_file(key, value)
                mark = self._add(f"file/{key.hex()}-{{}}", value)
                files[key.hex()] = File(mark, entry.mtime_ns, foreign=entry.origin.is_foreign)
                wanted.update((ref.chunk_id, None) for document in documents for ref in document.chunks)
                self.report.files += 1
                self.report.documents += len(documents)
        return files, list(wanted)

    def _chunk(self, chunk_id: bytes, chunks: dict[str, Chunk]) -> None:
        key, foreign = chunk_id.hex(), self.store.origin(chunk_id).is_foreign

        def add(level: str, records: Sequence[bytes]) -> None:
            member = kv_member(key, level, values.mark_of_records(records))
            self.write(member, to_safetensors(chunk_id, level, records))
            self.report.chunks += 1

        levels = None if chunk_id == self.identity.prefix_id else self.levels
        chunk = values.survey_chunk(self.store, chunk_id, None, self._note, self.key is not None, foreign, levels, add)
        if chunk is not None:
            self.write(chunk_name(key, chunk), values.value_of(self.store, chunk_name(key, chunk)) or b"")
            chunks[key] = chunk
        elif chunk_id != self.identity.prefix_id:  # an empty one has no record
            raise DamagedError("its description is lost")

    def _stretches(self, chunks: set[bytes]) -> None:
        """Write the states of prompts that were made of these chunks only, after the store's own instruction."""
        for stretch, info in sorted(self.store.stretches().items()):
            if info.own and chunks.issuperset(info.chunks):
                with self._noting(f"state checkpoint {stretch.hex()}"):
                    sealed = [(part_name(place), self.store.sealed_part(stretch, place)) for place in info.places]
                    self.write(f"stretch/{stretch.hex()}", self.store.sealed_stretch(stretch))
                    for name, value in sealed:
                        self.write(f"stretch/{stretch.hex()}/{name}", value)
                    self.report.checkpoints += 1

    def _profiles(self, chunks: dict[str, Chunk]) -> tuple[str, ...]:
        named = {level.maker for chunk in chunks.values() for level in chunk.levels.values()}
        named.add(str(self.store.codec_state().get("profile", "")))
        sound: list[str] = []
        for digest in (profile.hex() for profile in self.store.profile_digests()):
            if digest in named:
                with self._noting(f"profile {digest}"):
                    self.write(f"profile/{digest}", values.value_of(self.store, f"profile/{digest}") or b"")
                    sound.append(digest)
        return tuple(sound)

    def _note(self, what: str, why: str) -> None:
        self.report.damaged.append({"subject": what, "reason": why})

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            self._note(what, error.message)
