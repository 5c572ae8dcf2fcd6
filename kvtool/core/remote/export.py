"""Export of a store, or a part of it: a push into a pack, which also takes state checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import part_name
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.archive import ArchiveBlobs, written_archive
from kvtool.core.remote.options import ExportOptions, PushOptions
from kvtool.core.remote.push import push
from kvtool.core.remote.report import TransferReport
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.upkeep.selectors import named_documents

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
