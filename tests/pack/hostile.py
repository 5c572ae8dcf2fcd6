"""A pack, a store and a shared store of an attacker who wants to change the answers from a user's documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.record import decode_record, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.remote.options import ExportOptions
from kvtool.core.remote.packs import export
from kvtool.core.remote.values import records_of
from tests.cli.working import PREFIX, kvtool

TRUE, FALSE = "The harbour clock was built by Ada Lane in 1901.", "The harbour clock was built by Mallory Vane in 1666."


@dataclass(frozen=True)
class Scene:
    """The user's documents, and the stores of both."""

    own: Path
    mine: Path
    theirs: Path

    def ingest(self, *more: object, store: Path | None = None) -> dict[str, object]:
        return kvtool("ingest", self.own.parent, "--store", store or self.mine, *PREFIX, *more, "--json").fine().json

    def ask(self, *more: object, store: Path | None = None) -> dict[str, object]:
        path = store or self.mine
        asked = ("query", "Who built the harbour clock?", "--max-tokens", "8", "--store", path, "--json")
        return kvtool(*asked, *more).fine().json

    def pack(self, name: str = "theirs.kvpack") -> Path:
        path = self.theirs.parent / name
        assert export(self.theirs, path, ExportOptions(force=True)).damaged == []
        return path


def make_scene(folder: Path, tiny: Path) -> Scene:
    own, mine = folder / "docs" / "clock.md", folder / "mine"
    own.parent.mkdir()
    own.write_text(TRUE + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        kvtool("ingest", own.parent, "--store", mine, "--model", tiny, *PREFIX).fine()
    return Scene(own, mine, Path(shutil.copytree(mine, folder / "theirs")))


def of_file(store: Store, path: Path) -> tuple[FileEntry, DocumentEntry]:
    return store.file(str(path)), store.document(str(path))  # type: ignore[return-value]


def ids_of(path: Path, source: Path) -> list[bytes]:
    with Store.open(path) as store:
        return [ref.chunk_id for ref in of_file(store, source)[1].chunks]


def rewrite(scene: Scene, change: Callable[[FileEntry, DocumentEntry], tuple[FileEntry, DocumentEntry]]) -> None:
    with Store.open(scene.theirs) as store, store.writer() as writer:
        entry, document = change(*of_file(store, scene.own))
        writer.commit_file(entry, [document])


def claim(scene: Scene, path: str, text: str) -> None:
    """Their store: another text under the chunk id of the user's document."""

    def change(entry: FileEntry, document: DocumentEntry) -> tuple[FileEntry, DocumentEntry]:
        refs = (replace(document.chunks[0], start=0, end=len(text)),)
        return replace(entry, path=path, documents=(path,)), replace(document, source=path, text=text, chunks=refs)

    rewrite(scene, change)


def poison(path: Path, chunk: bytes, level: str = "raw", spared: int = 0) -> list[bytes]:
    """Replace a chunk's records by others that are sound, and of no text; returns them. The first `spared` stay."""
    with Store.open(path) as store, store.writer() as writer:
        info = store.chunk_info(chunk)
        records = []
        for record in records_of(store, chunk, level, info.layers):
            header, payload = decode_record(chunk, record)
            kept = header.layer < spared
            records.append(record if kept else encode_record(chunk, header, [bytes(len(payload))]))
        writer.put_chunk(chunk, info, level, records, replace=True)
        writer.flush()
    return records


def with_foreign_tokens(scene: Scene, tiny: Path) -> None:
    """Their store: the user's true text, over chunks of another text's tokens."""
    folder = scene.theirs.parent / "false"
    folder.mkdir()
    (folder / "clock.md").write_text(FALSE + "\n")
    kvtool("ingest", folder, "--store", scene.theirs).fine()
    false = ids_of(scene.theirs, folder / "clock.md")

    def change(entry: FileEntry, document: DocumentEntry) -> tuple[FileEntry, DocumentEntry]:
        refs = tuple(replace(ref, chunk_id=chunk) for ref, chunk in zip(document.chunks, false, strict=True))
        return replace(entry, mtime_ns=entry.mtime_ns + 10**9), replace(document, chunks=refs)

    rewrite(scene, change)
    kvtool("store", "rm", folder, "--store", scene.theirs, "--yes").fine()
