"""Documents of a store: selected by path, folder, glob or a chunk's id; listed; compared with their chunks' ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import tables
from kvtool.core.cache.integrity import Damage, in_sample
from kvtool.core.cache.store import Store
from kvtool.core.common.text import closed, composed, level_rows
from kvtool.core.errors import DamagedError, UsageError, did_you_mean
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.session.identity import model_files, store_identity

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry


_LISTED = "`kvtool store ls` lists documents, with --chunks their chunks"
Named = Mapping[str, str]  # source of a document -> path of its file; a file without documents names itself


def named_documents(store: Store, targets: Sequence[str]) -> list[str]:
    """Sources of all documents that these words mean, sorted; paths of files without a document, too."""
    sources: set[str] = set()
    named: Named | None = None
    for target in targets:
        if exactly := _exactly(store, target):
            sources |= exactly
            continue
        named = documents_of(store) if named is None else named
        sources |= _in_composed_form(target, named, lambda digits: _with_chunk(store, digits))
    return sorted(sources)


def _exactly(store: Store, target: str) -> set[str]:
    for path in (os.path.abspath(target), target) if target else ():
        entry, document = store.file(path), store.document(path)
        sources = {*(entry.documents or (path,))} if entry is not None else set()
        if sources := sources | ({path} if document is not None else set()):
            return sources
    return set()


def documents_of(store: Store) -> dict[str, str]:
    paths = {}
    for entry in store.files():
        for source in entry.documents or (entry.path,):
            paths[source] = entry.path
    return paths


def _in_composed_form(target: str, named: Named, with_chunk: Callable[[str], Iterable[str]]) -> set[str]:
    """Compare a word that is no name with names, in composed Unicode form."""
    if target.isascii():
        return {*_meant(target, named, with_chunk)}
    alike = {composed(source): composed(file) for source, file in named.items()}
    meant = {*_meant(composed(target), alike, with_chunk)}
    return {source for source in named if composed(source) in meant}


def _meant(target: str, named: Named, with_chunk: Callable[[str], Iterable[str]]) -> Iterable[str]:
    if not target:  # an unset variable of a script, not the folder where we are
        raise UsageError("an empty name means no document", _LISTED)
    for path in (os.path.abspath(target), target):
        sources = [source for source, file in named.items() if path in (source, file)]
        below = f"{path.rstrip('/')}/"
        if sources := sources or [source for source, file in named.items() if below != "/" and file.startswith(below)]:
            return sources
    if sources := _ending(target, named):
        return sources
    if sources := [source for source, file in named.items() if matches_glob(target, source, file)]:
        return sources
    if sources := list(with_chunk(target)):
        return sources
    names = {PurePosixPath(file).name: file for file in named.values()}
    near = did_you_mean(PurePosixPath(target).name, names, 0.7)  # names of files end alike
    hint = _folder_hint(target, named) or near or _LISTED
    raise UsageError(f"document not found: {target!r}", hint)


def _folder_hint(target: str, named: Named) -> str:
    """Return a hint for the end of a folder's path, which selects nothing: too much might be dropped."""
    tail = "/" + target.strip("/")
    folders = {str(folder) for file in named.values() for folder in PurePosixPath(file).parents}
    meant = sorted(folder for folder in folders if folder.endswith(tail))
    return f"name a folder by its path: {meant[0]}" if meant else ""


def matches_glob(glob: str, source: str, file: str) -> bool:
    """A glob matches a whole path, or its end from some folder on; of a JSON-lines file's document its file's, too."""
    if not set("*?[") & set(glob):
        return False
    return any(fnmatchcase(name, closed(form)) for form in (glob, f"*/{glob}") for name in (source, file))


def _ending(target: str, named: Named) -> list[str]:
    """Sources whose path ends so; none for a path that says from where it counts, which means no other file's end."""
    path = PurePosixPath(target)
    if path.is_absolute() or ".." in path.parts or not path.name:
        return []
    tail = f"/{path}"
    sources = [source for source, file in named.items() if source.endswith(tail) or file.endswith(tail)]
    files = sorted({named[source] for source in sources})
    if len(files) > 1:
        raise UsageError(f"{target!r} could be {files[0]} or {files[1]}", "give more of the path, or a glob")
    return sources


def _with_chunk(store: Store, target: str) -> list[str]:
    chunks = store.chunks_named(target)
    if len(chunks) > 1:
        raise UsageError(f"{len(chunks)} chunks have an id that begins with {target}", "give more digits")
    return [
        document.source
        for document in store.documents()
        if chunks and any(ref.chunk_id in chunks for ref in document.chunks)
    ]


@dataclass(slots=True)
class DocumentRow:
    """A document without its text, to list a million, its chunks and their sums; `modified` in seconds since 1970,
    other times of the chunk used last."""

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None
    pinned: bool
    chunks: list[ChunkRow] = field(default_factory=list)
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def add(self, row: ChunkRow) -> None:
        self.chunks.append(row)
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        self.last_used = max(filter(None, (self.last_used, row.last_used)), default=None)

    def to_json(self) -> dict[str, Any]:
        names = ("source", "kind", "characters", "origin", "modified", "tokens", "bytes", "last_used", "pinned")
        return {name: getattr(self, name) for name in names} | {"chunks": [row.to_json() for row in self.chunks]}


@dataclass(frozen=True, slots=True)
class ChunkRow:
    id: str
    start: int
    end: int
    tokens: int
    levels: dict[str, int]
    last_used: int | None

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        names = ("id", "start", "end", "tokens", "bytes", "last_used")
        return {name: getattr(self, name) for name in names} | {"levels": level_rows(self.levels)}


def list_documents(store: Store, targets: Sequence[str] = ()) -> list[DocumentRow]:
    """The documents that the targets select by path, all without any. Raises UsageError: a target selects nothing;
    DamagedError."""
    documents: list[DocumentRow] = []
    with store.view():
        sources = {*named_documents(store, targets)} if targets else None
        files = {source: entry for entry in store.files() for source in entry.documents}
        used, pins = store.last_used(), {*store.pins()}
        for document in (each for each in store.documents() if sources is None or each.source in sources):
            entry = files.get(document.source)
            origin, modified = (entry.origin.name, entry.mtime_ns // 10**9) if entry is not None else ("", 0)
            source, length = document.source, len(document.text)
            documents.append(DocumentRow(source, document.kind, length, origin, modified or None, source in pins))
            for ref in document.chunks:
                key, last = ref.chunk_id.hex(), used.get(ref.chunk_id)
                sizes = store.level_sizes(ref.chunk_id)
                documents[-1].add(ChunkRow(key, ref.start, ref.end, ref.tokens, sizes, last))
    return documents


def listed(documents: Iterable[DocumentRow]) -> dict[str, Any]:
    documents = [*documents]
    sizes = {row.id: row.bytes for document in documents for row in document.chunks}
    shown = [document.to_json() for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}


def stored_tokenizer(store: Store) -> Any:
    """Load the tokenizer of a store's model without using the network. Raises ModelError."""
    from kvtool.core.checkpoint.load import load_tokenizer

    return load_tokenizer(model_files(store_identity(store), ModelOptions(offline=True), store.made_by()))


def compare_texts(store: Store, tokenizer: Any, sample: Fraction = Fraction(1)) -> tuple[int, list[Damage]]:
    compared, damaged = 0, list[Damage]()
    for source in store.sources():
        key = tables.name_key(source)
        if not in_sample(key, sample):
            continue
        with suppress(DamagedError):  # a damaged document, which other checks report
            document = store.document(source)
            if document is None:
                continue
            compared += 1
            reason = next(_differences(store, document, tokenizer), None)
            if reason is not None:
                damaged.append(Damage(reason, "documents", key.hex()))
    return compared, damaged


def _differences(store: Store, document: DocumentEntry, tokenizer: Any) -> Iterator[str]:
    texts = [document.text[ref.start : ref.end] for ref in document.chunks]
    for number, (ref, ids) in enumerate(zip(document.chunks, chunk_tokens(tokenizer, texts), strict=True), 1):
        with suppress(DamagedError):
            info = store.chunk_info(ref.chunk_id)
            if info is not None and info.token_ids != ids:
                yield f"chunk {number} is of another text than the document's"
