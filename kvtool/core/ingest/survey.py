"""Survey of files for changes, and the chunks of changed files; loads no model.

An unchanged file costs a stat. Marks are stored in a side file: digests of a file's path, its place and times on the
disk, and the digest of its content. A mark counts only if the store has that content; a file without one is read again.
The mark of an unreadable file names its reader, and the reason is stored until the file is read or deleted.
"""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtool.core import __version__
from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.files import read_regular
from kvtool.core.common.types import Ids
from kvtool.core.corpus.readers import kind_of
from kvtool.core.corpus.readers.document import (
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
from kvtool.core.corpus.tables import split_document
from kvtool.core.corpus.walk import Failure, FoundFile, Skip, Skipped, places
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.model.tokens import count_tokens
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity

_LARGEST_ARCHIVE = 1 << 28  # bytes
_LARGEST = 1 << 31  # bytes; a file is read as a whole, and several copies of its text are made


@dataclass(frozen=True, slots=True)
class ChangedFile:
    found: FoundFile
    digest: str
    settings: str
    documents: list[Document]
    known: FileEntry | None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for document in self.documents for note in document.notes)


Outcome = ChangedFile | FileEntry | Failure | Skipped
"""A changed file, the store's entry of an unchanged one, or the reason why there is no text."""


def survey(file: FoundFile, store: Store | None, settings: str, reading: Reading, seen: Seen) -> Outcome:
    """Compare a file with the store, by a stat or by its bytes; other `settings` make every file changed."""
    path = file.name
    known = store.file(path) if store is not None else None
    try:
        return _look(file, known, store, settings, reading, seen)
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


def is_known(file: FoundFile, store: Store, settings: str, reading: Reading, seen: Seen) -> bool:
    known = store.file(file.name)
    if known is None or not _was_read_so(known, file, settings, reading):
        return False
    is_whole = seen.vouches(store, file.name, known.digest) or _is_whole(known, store)
    return is_whole and seen.is_unchanged(store, file.name, known.digest)


def _was_read_so(known: FileEntry, file: FoundFile, settings: str, reading: Reading) -> bool:
    """Return True if a file would be read as it was, or was read while more libraries were installed than now."""
    own = {settings + reading.settings(file.path, is_whole=is_whole) for is_whole in (False, True)}
    return known.settings in own and not known.origin.is_foreign


def reason_of(error: Exception) -> str:
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
    same = store and known and _was_read_so(known, file, settings, reading)
    if store and known and same and seen.vouches(store, file.name, known.digest):
        return known
    is_stored = store and known and same and _is_whole(known, store)
    if store and known and is_stored and seen.is_unchanged(store, file.name, known.digest):
        return known
    means = reading.means(file.path)
    if store and (failure := seen.failure(store, file.name, means)):
        return _unreadable(file, known, failure, reading, read=False)
    before = os.stat(file.name)
    try:
        if file.guessed:
            check(read_regular(file.name, SNIFFED), before.st_size)
        if kind_of(file.path) == "archive" and before.st_size > _LARGEST_ARCHIVE:
            raise BinaryFile(f"archive of over {_LARGEST_ARCHIVE >> 20} MiB: unpack it, and name the folder")
        data = read_regular(file.name, _LARGEST + 1) if before.st_size <= _LARGEST else b""
        if max(before.st_size, len(data)) > _LARGEST:
            raise UnreadableFile(f"larger than {_LARGEST >> 30} GiB: split it")
        digest = hashlib.sha256(data).hexdigest()
        seen.note(file.name, before, digest)
        if known and is_stored and known.digest == digest:
            return known
        # as it was read: a file that grows is larger by now than when it was found
        file = replace(file, size=len(data), mtime_ns=before.st_mtime_ns)
        documents = reading.documents(file.path, data)
        if file.guessed:
            check_text(documents)
        return ChangedFile(file, digest, settings + reading.settings(file.path), documents, known)
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
    if file.guessed or (
        isinstance(error, BinaryFile) and (kind_of(file.path) == "archive" or not reading.takes(file.path))
    ):
        return Skipped(path, Skip.UNSUPPORTED, error.message)
    return Failure(path, error.message, not read, read)


def _is_whole(entry: FileEntry, store: Store) -> bool:
    try:
        documents = [store.document(source) for source in entry.documents]
    except DamagedError:
        return False
    return all(document and all(store.has_chunk(c.chunk_id) for c in document.chunks) for document in documents)


# ---- the chunks of a changed file ----


@dataclass(frozen=True, slots=True)
class PreparedFile:
    entry: FileEntry
    documents: tuple[DocumentEntry, ...]
    chunks: tuple[ChunkSpec, ...]
    is_new: bool

    @property
    def chunk_ids(self) -> tuple[bytes, ...]:
        return tuple(chunk.chunk_id for chunk in self.chunks)


def prepare(file: ChangedFile, identity: StoreIdentity, tokenizer: Any) -> PreparedFile:
    documents: list[DocumentEntry] = []
    chunks: list[ChunkSpec] = []
    for document in file.documents:
        cut, wanted = _cut(document, identity, tokenizer)
        documents.append(cut)
        chunks.extend(wanted)
    entry = FileEntry(
        path=file.found.name,
        size=file.found.size,
        mtime_ns=file.found.mtime_ns,
        digest=file.digest,
        settings=file.settings,
        documents=tuple(document.source for document in documents),
        notes=file.notes,
    )
    return PreparedFile(entry, tuple(documents), tuple(chunks), file.known is None)


def _cut(document: Document, identity: StoreIdentity, tokenizer: Any) -> tuple[DocumentEntry, list[ChunkSpec]]:
    document, spans = split_document(document, identity.split, count_tokens(tokenizer))
    ids = chunk_tokens(tokenizer, [document.text[span.start : span.end] for span in spans])
    befores: list[Ids] = [(), *ids[:-1]] if identity.lead_in.mode == NEIGHBOUR else [()] * len(ids)
    wanted = [identity.wanted(*pair) for pair in zip(ids, befores, strict=True)]
    refs = [
        ChunkRef(chunk.chunk_id, span.start, span.end, len(chunk.ids))
        for span, chunk in zip(spans, wanted, strict=True)
    ]
    return DocumentEntry(document.source, document.kind, document.text, tuple(refs), document.marks), wanted


# ---- what is gone, and what is still there ----


def vanished(paths: Sequence[Path], store: Store) -> list[Path]:
    """Find the given folders that are empty or missing but have files in the store: a disk may not be mounted."""
    empty = {path: set(places(path)) for path in paths if not holds_anything(path)}
    below = {parent for entry in store.files() for parent in Path(entry.path).parents} if empty else set()
    return [path for path, roots in empty.items() if not roots.isdisjoint(below)]


def holds_anything(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(True for _ in entries)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def is_below(path: str, roots: set[Path]) -> bool:
    return not roots.isdisjoint((Path(path), *Path(path).parents))


def exists(path: Path) -> bool:
    """Return True also for an unreadable path: a failing disk is no reason to remove documents."""
    try:
        path.stat()  # `exists` says no of it from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


_NAME, _FORMAT = "seen/files.json", 1
_MARK_BYTES = 16
_RACY_SECONDS = 2.0  # a file may change again without a new time stamp
_SPARE = 10_000  # marks of deleted files, or of another reader
_SPARE_FAILURES = 1_000


_Failures = dict[str, dict[str, str]]  # which files could not be read and why, by their marks in hex


class Seen:
    """Marks of a store's files. `retry`: read files again that could not be read."""

    def __init__(self, retry: bool = False) -> None:
        self._retry = retry
        self._known: tuple[set[bytes], _Failures] | None = None  # read at first use
        self._whole = False  # whether every chunk of the known files is still stored
        self._now: set[bytes] = set()  # of files of this run
        self._noted: dict[str, bytes] = {}  # of files that it has read, by path
        self._failed: _Failures = {}  # likewise
        self._fine: set[str] = set()  # paths of files that could be read

    def is_unchanged(self, store: Store, path: str, digest: str) -> bool:
        with suppress(OSError):
            mark = _mark(path, os.stat(path), digest)
            if mark in self._of(store)[0]:
                self._now.add(mark)
                self._fine.add(path)
                return True
        return False

    def vouches(self, store: Store, path: str, digest: str) -> bool:
        """Return True if a file is unchanged, and none of its chunks can have been removed since."""
        self._of(store)
        return self._whole and self.is_unchanged(store, path, digest)

    def failure(self, store: Store, path: str, means: str) -> UnreadableFile | None:
        """Return the earlier error of an unchanged unreadable file; None: read it."""
        if self._retry:
            return None
        with suppress(OSError, KeyError, TypeError, AttributeError):  # a row may be of another kvtool
            mark = _mark(path, os.stat(path), means).hex()
            row = self._of(store)[1][mark]
            error = UnreadableFile.from_row(row)
            self._failed[mark] = row | {"path": path}
            return error
        return None

    def compared(self, store: Store | None, failure: Failure, means: str = "") -> Failure:
        """Mark a failure as known if the unchanged file failed before with this message; note it otherwise."""
        with suppress(OSError):
            mark = _mark(failure.path, os.stat(failure.path), repr((__version__, means, failure.error))).hex()
            self._failed[mark] = {"path": failure.path, "message": failure.error}
            return replace(failure, known=not self._retry and store is not None and mark in self._of(store)[1])
        return failure

    def note(self, path: str, before: os.stat_result, digest: str) -> None:
        """Note the content of a file. `before`: its status before it was read."""
        self._fine.add(path)
        if _rests(before):
            self._noted[path] = _mark(path, before, digest)

    def take_back(self, path: str) -> None:
        self._noted.pop(path, None)
        self._fine.discard(path)

    def note_failure(self, path: str, before: os.stat_result, means: str, error: UnreadableFile) -> None:
        self._fine.discard(path)
        if _rests(before):
            self._failed[_mark(path, before, means).hex()] = error.to_row() | {"path": path}

    def keep(self, store: Store, whole: bool) -> None:
        """Store the marks for the next run, with those of other files unless a `whole` run found many fewer."""
        known, known_failures = self._of(store)
        now = self._now | {*self._noted.values()}
        failures = {mark: row for mark, row in known_failures.items() if self._may_fail(row)} | self._failed
        if self._whole and now <= known and failures == known_failures:
            return
        marks = known | now
        if whole and (not self._whole or len(marks) > 2 * len(now) + _SPARE):
            marks = now
        if whole and len(failures) > 2 * len(self._failed) + _SPARE_FAILURES:
            failures = self._failed
        packed = b64encode(b"".join(sorted(marks))).decode("ascii")
        at = store.dropped_revision() if whole else None
        store.write_side(_NAME, {"format": _FORMAT, "marks": packed, "failures": failures, "whole": at})

    def _may_fail(self, row: object) -> bool:
        path = row.get("path") if isinstance(row, dict) else None
        return isinstance(path, str) and path not in self._fine and os.path.lexists(path)

    def _of(self, store: Store) -> tuple[set[bytes], _Failures]:
        if self._known is None:
            marks, failures, at = _read(store)
            self._known = marks, failures
            self._whole = at == store.dropped_revision()
        return self._known


def _rests(status: os.stat_result) -> bool:
    return time.time() - max(status.st_mtime, status.st_ctime) > _RACY_SECONDS


def _mark(path: str, status: os.stat_result, held: str) -> bytes:
    place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.blake2b(repr((path, place, held)).encode("utf-8", "surrogatepass"), digest_size=_MARK_BYTES).digest()


def _read(store: Store) -> tuple[set[bytes], _Failures, int | None]:
    kept = store.read_side(_NAME, format=_FORMAT)
    failures = kept.get("failures", {})
    try:
        data = b64decode(kept.get("marks", ""), validate=True)
    except (ValueError, TypeError):
        data = b""
    marks = {data[at : at + _MARK_BYTES] for at in range(0, len(data), _MARK_BYTES)}
    return marks, failures if isinstance(failures, dict) else {}, kept.get("whole")
