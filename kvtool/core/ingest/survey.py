"""Which files changed, by content; nothing here loads a model or a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.corpus.readers import BinaryFile, Document, EmptyFile, UnreadableFile, is_known, read_documents
from kvtool.core.corpus.walk import Failure, FoundFile, Skip, Skipped, Walked, places
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.ingest.options import IngestOptions

_LARGEST = 1 << 31  # bytes; a file is read as a whole, and several copies of its text are made


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
    skipped: list[Skipped]

    def __bool__(self) -> bool:
        """Whether there was anything to take, or to forget."""
        return bool(self.changed or self.unchanged or self.gone)


def survey(walked: Walked, options: IngestOptions, store: Store | None, settings: str) -> Survey:
    """Read and hash every file; compare with the store. Whatever one file does, it fails alone.

    Parameters
    ----------
    walked : what `find_files` found.
    settings : digest of what chunks depend on besides the text; other settings make every file changed.
    """
    found = Survey([], [], [], list(walked.failures), list(walked.skipped))
    for file in walked.files:
        known = store.file(str(file.path)) if store is not None else None
        try:
            _look(file, known, store, settings, found)
        except FileNotFoundError:
            found.skipped.append(Skipped(str(file.path), Skip.GONE, "gone since the folder was listed"))
        except UnreadableFile as error:
            _sort_out(file, known, error, found)
        except Exception as error:
            found.failures.append(Failure(str(file.path), reason_of(error)))
    if options.sync and store:
        found.gone.extend(_gone(options, store, {str(file.path) for file in walked.files}))
    return found


def reason_of(error: Exception) -> str:
    """Why a file failed, for a list of failures."""
    if isinstance(error, KvtoolError):
        return error.message
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MemoryError):
        return "not enough memory to read it"
    return f"unexpected {type(error).__name__}: {error}".rstrip(": ")


def _look(file: FoundFile, known: FileEntry | None, store: Store | None, settings: str, found: Survey) -> None:
    if file.size > _LARGEST:
        raise UnreadableFile(f"larger than {_LARGEST >> 30} GiB: split it")
    data = file.path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if store and known and (known.digest, known.settings) == (digest, settings) and _is_whole(known, store):
        found.unchanged.append(known)
    else:
        found.changed.append(ChangedFile(file, digest, read_documents(file.path, data), known))


def _sort_out(file: FoundFile, known: FileEntry | None, error: UnreadableFile, found: Survey) -> None:
    """Whether a file without text failed, or is only passed over. One that had a text failed: its old one goes on."""
    path = str(file.path)
    if known is not None and known.documents:
        found.failures.append(Failure(path, f"{error.message}; what was read from it before stays in the store"))
    elif isinstance(error, EmptyFile):
        found.skipped.append(Skipped(path, Skip.EMPTY, error.message))
    elif isinstance(error, BinaryFile) and not is_known(file.path):
        found.skipped.append(Skipped(path, Skip.UNSUPPORTED, error.message))
    else:
        found.failures.append(Failure(path, error.message))


def _is_whole(entry: FileEntry, store: Store) -> bool:
    """Whether every chunk of the file is still stored; a file with holes is made whole as if it had changed."""
    try:
        documents = [store.document(source) for source in entry.documents]
    except DamagedError:
        return False
    return all(document and all(store.has_chunk(c.chunk_id) for c in document.chunks) for document in documents)


def _gone(options: IngestOptions, store: Store, present: set[str]) -> Iterator[FileEntry]:
    """Files of the store below the given paths that are not there any more."""
    roots = {place for path in options.paths for place in places(path)}
    for entry in store.files():
        if entry.path not in present and is_below(entry, roots) and not _exists(Path(entry.path)):
            yield entry


def is_below(entry: FileEntry, roots: set[Path]) -> bool:
    """Whether a file of the store is one of these, or lies in one of these folders."""
    path = Path(entry.path)
    return not roots.isdisjoint((path, *path.parents))


def _exists(path: Path) -> bool:
    """What cannot be looked at may be there: a disk that fails is no reason to forget."""
    try:
        return path.exists()
    except OSError:
        return True
