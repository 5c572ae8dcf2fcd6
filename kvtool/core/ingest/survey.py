"""Survey of changed files, by content; loads no model and no tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.files import read_regular
from kvtool.core.corpus.readers import (
    BinaryFile,
    Document,
    EmptyFile,
    MissingPackage,
    PassingFailure,
    SecretFile,
    UnreadableFile,
)
from kvtool.core.corpus.readers.unknown import SNIFFED, check, check_text
from kvtool.core.corpus.reading import Reading
from kvtool.core.corpus.walk import Failure, FoundFile, Skip, Skipped, places
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.ingest.seen import Seen

_LARGEST = 1 << 31  # bytes; a file is read as a whole, and several copies of its text are made


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """Holds a file whose content or settings differ from what the store has; `known` is what it has."""

    found: FoundFile
    digest: str
    settings: str
    documents: list[Document]
    known: FileEntry | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes of the file's readers."""
        return tuple(note for document in self.documents for note in document.notes)


@dataclass(frozen=True, slots=True)
class UnchangedFile:
    """Names a file that the store has just so."""

    known: FileEntry


Outcome = ChangedFile | UnchangedFile | Failure | Skipped


def survey(file: FoundFile, store: Store | None, settings: str, reading: Reading, seen: Seen) -> Outcome:
    """Compare a file with the store: by a stat where it lies as it was last read, else by its bytes. Whatever one file
    does, it fails alone.

    Parameters
    ----------
    settings : digest of what chunks depend on besides the text; other settings make every file changed.
    """
    path = file.name
    known = store.file(path) if store is not None else None
    try:
        return _look(file, known, store, settings + reading.settings(file.path), reading, seen)
    except FileNotFoundError:
        return Skipped(path, Skip.GONE, "gone since the folder was listed")
    except UnreadableFile as error:
        outcome = _unreadable(file, known, error, reading)
        return seen.compared(store, outcome, reading.means(file.path)) if isinstance(outcome, Failure) else outcome
    except Exception as error:
        reason = reason_of(error)
        if file.guessed and not known:
            return Skipped(path, Skip.UNSUPPORTED, reason)
        return seen.compared(store, Failure(path, reason))


def reason_of(error: Exception) -> str:
    """Word why a file failed, for a list of failures."""
    if isinstance(error, KvtoolError):
        return error.message
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MemoryError):
        return "not enough memory to read it"
    return f"unexpected {type(error).__name__}: {error}".rstrip(": ")


def _look(
    file: FoundFile, known: FileEntry | None, store: Store | None, settings: str, reading: Reading, seen: Seen
) -> Outcome:
    same = store and known and known.settings == settings and not known.origin.is_foreign
    if store and known and same and seen.vouches(store, file.name, known.digest):
        return UnchangedFile(known)
    stands = store and known and same and _is_whole(known, store)
    if store and known and stands and seen.is_unchanged(store, file.name, known.digest):
        return UnchangedFile(known)
    means = reading.means(file.path)
    if store and (failure := seen.failure(store, file.name, means)):
        return _unreadable(file, known, failure, reading, read=False)
    before = os.stat(file.name)
    try:
        if file.guessed:
            check(read_regular(file.name, SNIFFED), before.st_size)
        data = read_regular(file.name, _LARGEST + 1) if before.st_size <= _LARGEST else b""
        if max(before.st_size, len(data)) > _LARGEST:
            raise UnreadableFile(f"larger than {_LARGEST >> 30} GiB: split it")
        digest = hashlib.sha256(data).hexdigest()
        seen.note(file.name, before, digest)
        if known and stands and known.digest == digest:
            return UnchangedFile(known)
        # as it was read: a file that grows is larger by now than when it was found
        file = replace(file, size=len(data), mtime_ns=before.st_mtime_ns)
        documents = reading.documents(file.path, data)
        if file.guessed:
            check_text(documents)
        return ChangedFile(file, digest, settings, documents, known)
    except UnreadableFile as error:
        if not isinstance(error, PassingFailure):
            seen.note_failure(file.name, before, means, error)
        raise


def _unreadable(
    file: FoundFile, known: FileEntry | None, error: UnreadableFile, reading: Reading, read: bool = True
) -> Failure | Skipped:
    """Classify a file without text: failed, or only skipped. A file that had a text fails: its old text stays."""
    path = file.name
    if known is not None and known.documents:
        return Failure(path, f"{error.message}; what was read from it before stays in the store", not read, read)
    if isinstance(error, EmptyFile):
        return Skipped(path, Skip.EMPTY, error.message)
    if isinstance(error, MissingPackage):
        return Skipped(path, Skip.UNINSTALLED, f"{error.message} ({error.hint})")
    if isinstance(error, SecretFile):
        return Skipped(path, Skip.SECRET, error.message)
    if file.guessed or (isinstance(error, BinaryFile) and not reading.takes(file.path)):
        return Skipped(path, Skip.UNSUPPORTED, error.message)
    return Failure(path, error.message, not read, read)


def _is_whole(entry: FileEntry, store: Store) -> bool:
    """Return True if every chunk of the file is still stored; otherwise the file is treated as changed."""
    try:
        documents = [store.document(source) for source in entry.documents]
    except DamagedError:
        return False
    return all(document and all(store.has_chunk(c.chunk_id) for c in document.chunks) for document in documents)


def gone(paths: Sequence[Path], store: Store, present: set[str]) -> Iterator[FileEntry]:
    """Find the files of the store below the given paths that are not there any more."""
    roots = _roots(paths)
    return (entry for entry in store.files() if _is_gone(entry.path, roots, present))


def abandoned(paths: Sequence[Path], store: Store, present: set[str]) -> list[str]:
    """List the paths of unfinished files, likewise."""
    roots = _roots(paths)
    return [path for path in store.unfinished() if _is_gone(path, roots, present)]


def _roots(paths: Sequence[Path]) -> set[Path]:
    return {place for path in paths for place in places(path)}


def _is_gone(path: str, roots: set[Path], present: set[str]) -> bool:
    return path not in present and is_below(path, roots) and not _exists(Path(path))


def vanished(paths: Sequence[Path], store: Store) -> list[Path]:
    """Find the given folders of which the store has files and where nothing is now, not even something hidden. A disk
    that is not mounted looks so."""
    empty = {path: set(places(path)) for path in paths if not holds_anything(path)}
    below = {parent for entry in store.files() for parent in Path(entry.path).parents} if empty else set()
    return [path for path, roots in empty.items() if not roots.isdisjoint(below)]


def holds_anything(path: Path) -> bool:
    """Return True for a file, or a folder with something in it, and for what cannot be looked at."""
    try:
        with os.scandir(path) as entries:
            return any(True for _ in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_below(path: str, roots: set[Path]) -> bool:
    """Return True if a file is one of these, or in one of these folders."""
    return not roots.isdisjoint((Path(path), *Path(path).parents))


def _exists(path: Path) -> bool:
    """Return True also if a path cannot be looked at: a failing disk is no reason to forget documents."""
    try:
        path.stat()  # `exists` says no of it from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
