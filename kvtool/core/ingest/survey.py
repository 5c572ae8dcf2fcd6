"""Which files changed, by content; nothing here loads a model or a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.corpus.readers import Document, read_documents
from kvtool.core.corpus.walk import Failure, FoundFile
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.ingest.report import IngestOptions


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file whose content or settings differ from what the store has; `known` is what it has."""

    found: FoundFile
    digest: str
    documents: list[Document]
    known: FileEntry | None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for document in self.documents for note in document.notes)


@dataclass(frozen=True, slots=True)
class Survey:
    """What an ingest has to do."""

    changed: list[ChangedFile]
    unchanged: list[FileEntry]
    gone: list[FileEntry]
    failures: list[Failure]


def survey(
    walked: tuple[list[FoundFile], list[Failure]], options: IngestOptions, store: Store | None, settings: str
) -> Survey:
    """Read and hash every file; compare with the store.

    Parameters
    ----------
    walked : what `find_files` found.
    settings : digest of what chunks depend on besides the text; other settings make every file changed.
    """
    found, failures = walked[0], list(walked[1])
    changed: list[ChangedFile] = []
    unchanged: list[FileEntry] = []
    for file in found:
        known = store.file(str(file.path)) if store is not None else None
        try:
            data = file.path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if store and known and (known.digest, known.settings) == (digest, settings) and _is_whole(known, store):
                unchanged.append(known)
            else:
                changed.append(ChangedFile(file, digest, read_documents(file.path, data), known))
        except OSError as error:
            failures.append(Failure(str(file.path), error.strerror or str(error)))
        except KvtoolError as error:
            failures.append(Failure(str(file.path), error.message))
    gone = list(_gone(options, store, {str(file.path) for file in found})) if options.sync and store else []
    return Survey(changed, unchanged, gone, failures)


def _is_whole(entry: FileEntry, store: Store) -> bool:
    """Whether every chunk of the file is still stored; a file with holes is made whole as if it had changed."""
    try:
        documents = [store.document(source) for source in entry.documents]
    except DamagedError:
        return False
    return all(document and all(store.has_chunk(c.chunk_id) for c in document.chunks) for document in documents)


def _gone(options: IngestOptions, store: Store, present: set[str]) -> Iterator[FileEntry]:
    """Files of the store below the given paths that are not there any more."""
    roots = [Path(path).absolute() for path in options.paths]
    for entry in store.files():
        path = Path(entry.path)
        if entry.path not in present and not path.exists() and any(path.is_relative_to(root) for root in roots):
            yield entry
