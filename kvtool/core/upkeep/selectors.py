"""Documents of a store: selected by path, folder, glob or a chunk's id; listed; compared with their chunks' ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from kvtool.core.cache.store import Store
from kvtool.core.common.spelling import closed, composed
from kvtool.core.errors import UsageError, did_you_mean

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
        if sources := sources | ({path} if document is not None or path in store.unfinished() else set()):
            return sources
    return set()


def documents_of(store: Store) -> dict[str, str]:
    paths = {}
    for entry in store.files():
        for source in entry.documents or (entry.path,):
            paths[source] = entry.path
    return {path: path for path in store.unfinished()} | paths


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
