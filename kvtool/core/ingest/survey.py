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
from itertools import chain
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
from kvtool.core.corpus.readers.text import SNIFFED, check, check_text
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
_SKIPS: dict[type, Skip] = {EmptyFile: Skip.EMPTY, MissingPackage: Skip.UNINSTALLED, SecretFile: Skip.SECRET}


class Survey:
    """Compares files with the store of `seen`, by a stat or by their bytes; other `settings` change every file."""

    def __init__(self, settings: str, reading: Reading, seen: Seen) -> None:
        self._settings, self._reading, self._seen = settings, reading, seen

    def look(self, file: FoundFile) -> Outcome:
        known = self._seen.entry(file.name)
        try:
            return known if known is not None and self._is_known(file, known) else self._read(file, known)
        except FileNotFoundError:
            return Skipped(file.name, Skip.GONE, "gone since the folder was listed")
        except UnreadableFile as error:
            outcome = self._unreadable(file, known, error)
            means = self._reading.means(file.path)
            return self._seen.compared(outcome, means) if isinstance(outcome, Failure) else outcome
        except Exception as error:
            if file.guessed and not known:
                return Skipped(file.name, Skip.UNSUPPORTED, reason_of(error))
            return self._seen.compared(Failure(file.name, reason_of(error)))

    def _is_known(self, file: FoundFile, known: FileEntry) -> bool:
        is_unchanged = self._was_read_so(file, known) and self._seen.is_unchanged(file.name, known.digest)
        return is_unchanged and (self._seen.none_dropped or self._seen.is_whole(known))

    def _was_read_so(self, file: FoundFile, known: FileEntry) -> bool:
        """Return True if a file would be read as it was, or was read while more libraries were installed than now."""
        own = {self._settings + self._reading.settings(file.path, is_whole=is_whole) for is_whole in (False, True)}
        return known.settings in own and not known.origin.is_foreign

    def _read(self, file: FoundFile, known: FileEntry | None) -> Outcome:
        means = self._reading.means(file.path)
        if failure := self._seen.failure(file.name, means):
            return self._unreadable(file, known, failure, is_known=True)
        before = os.stat(file.name)
        try:
            data = _data_of(file, before.st_size)
            digest = hashlib.sha256(data).hexdigest()
            self._seen.note(file.name, before, digest)
            if known and known.digest == digest and self._was_read_so(file, known) and self._seen.is_whole(known):
                return known
            # as it was read: a file that grows is larger by now than when it was found
            file = replace(file, size=len(data), mtime_ns=before.st_mtime_ns)
            documents = self._reading.documents(file.path, data)
            if file.guessed:
                check_text(documents)
            return ChangedFile(file, digest, self._settings + self._reading.settings(file.path), documents, known)
        except UnreadableFile as error:
            if not isinstance(error, PassingFailure):
                self._seen.note_failure(file.name, before, means, error)
            raise

    def _unreadable(
        self, file: FoundFile, known: FileEntry | None, error: UnreadableFile, is_known: bool = False
    ) -> Failure | Skipped:
        """Classify a file without text: failed, or only skipped. A file that had a text fails: its old text stays."""
        reason, kind = error.message, _SKIPS.get(type(error))
        if known is not None and known.documents:
            return Failure(file.name, f"{reason}; what was read from it before stays in the store", is_known)
        if kind is None and self._is_unsupported(file, error):
            kind = Skip.UNSUPPORTED
        if kind is None:
            return Failure(file.name, reason, is_known)
        return Skipped(file.name, kind, f"{reason} ({error.hint})" if kind is Skip.UNINSTALLED else reason)

    def _is_unsupported(self, file: FoundFile, error: UnreadableFile) -> bool:
        is_other = kind_of(file.path) == "archive" or not self._reading.takes(file.path)
        return file.guessed or (isinstance(error, BinaryFile) and is_other)


def _data_of(file: FoundFile, size: int) -> bytes:
    if file.guessed:
        check(read_regular(file.name, SNIFFED), size)
    if kind_of(file.path) == "archive" and size > _LARGEST_ARCHIVE:
        raise BinaryFile(f"archive of over {_LARGEST_ARCHIVE >> 20} MiB: unpack it, and name the folder")
    data = read_regular(file.name, _LARGEST + 1) if size <= _LARGEST else b""
    if max(size, len(data)) > _LARGEST:
        raise UnreadableFile(f"larger than {_LARGEST >> 30} GiB: split it")
    return data


def reason_of(error: Exception) -> str:
    if isinstance(error, KvtoolError):
        return error.message
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MemoryError):
        return "not enough memory to read it"
    return f"unexpected {type(error).__name__}: {error}".rstrip(": ")


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
    cut = [_cut(document, identity, tokenizer) for document in file.documents]
    documents, chunks = tuple(document for document, _ in cut), tuple(chain(*(wanted for _, wanted in cut)))
    entry = FileEntry(
        path=file.found.name,
        size=file.found.size,
        mtime_ns=file.found.mtime_ns,
        digest=file.digest,
        settings=file.settings,
        documents=tuple(document.source for document in documents),
        notes=file.notes,
    )
    return PreparedFile(entry, documents, chunks, file.known is None)


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
    """Marks of a store's files; None: no store yet."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._read: tuple[set[bytes], _Failures, bool] | None = None  # at first use
        self._now: set[bytes] = set()  # of files of this run
        self._noted: dict[str, bytes] = {}  # of files that it has read, by path
        self._failed: _Failures = {}  # likewise
        self._fine: set[str] = set()  # paths of files that could be read

    def entry(self, path: str) -> FileEntry | None:
        return self.store.file(path) if self.store is not None else None

    def is_unchanged(self, path: str, digest: str) -> bool:
        with suppress(OSError):
            mark = _mark(path, os.stat(path), digest)
            if mark in self._kept[0]:
                self._now.add(mark)
                self._fine.add(path)
                return True
        return False

    @property
    def none_dropped(self) -> bool:
        """Whether no chunk of a file with a mark can have been removed since."""
        return self._kept[2]

    def is_whole(self, entry: FileEntry) -> bool:
        store = self.store
        assert store is not None  # it has the entry
        try:
            documents = [store.document(source) for source in entry.documents]
        except DamagedError:
            return False
        return all(each and all(store.describes_own(ref.chunk_id) for ref in each.chunks) for each in documents)

    def failure(self, path: str, means: str) -> UnreadableFile | None:
        """Return the earlier error of an unchanged unreadable file; None: read it."""
        with suppress(OSError, KeyError, TypeError, AttributeError):  # a row may be of another kvtool
            mark = _mark(path, os.stat(path), means).hex()
            row = self._kept[1][mark]
            error = UnreadableFile.from_row(row)
            self._failed[mark] = row | {"path": path}
            return error
        return None

    def compared(self, failure: Failure, means: str = "") -> Failure:
        """Mark a failure as known if the unchanged file failed before with this message; note it otherwise."""
        with suppress(OSError):
            mark = _mark(failure.path, os.stat(failure.path), repr((__version__, means, failure.error))).hex()
            self._failed[mark] = {"path": failure.path, "message": failure.error}
            return replace(failure, known=mark in self._kept[1])
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
        known, known_failures, was_whole = self._kept
        now = self._now | {*self._noted.values()}
        failures = {mark: row for mark, row in known_failures.items() if self._may_fail(row)} | self._failed
        if was_whole and now <= known and failures == known_failures:
            return
        marks = known | now
        if whole and (not was_whole or len(marks) > 2 * len(now) + _SPARE):
            marks = now
        if whole and len(failures) > 2 * len(self._failed) + _SPARE_FAILURES:
            failures = self._failed
        packed = b64encode(b"".join(sorted(marks))).decode("ascii")
        at = store.dropped_revision() if whole else None
        store.write_side(_NAME, {"format": _FORMAT, "marks": packed, "failures": failures, "whole": at})

    def _may_fail(self, row: object) -> bool:
        path = row.get("path") if isinstance(row, dict) else None
        return isinstance(path, str) and path not in self._fine and os.path.lexists(path)

    @property
    def _kept(self) -> tuple[set[bytes], _Failures, bool]:
        """Return the stored marks, and whether every chunk of their files is still stored."""
        if self._read is None and self.store is not None:
            self._read = _read(self.store)
        return self._read or (set(), {}, False)


def _rests(status: os.stat_result) -> bool:
    return time.time() - max(status.st_mtime, status.st_ctime) > _RACY_SECONDS


def _mark(path: str, status: os.stat_result, held: str) -> bytes:
    place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.blake2b(repr((path, place, held)).encode("utf-8", "surrogatepass"), digest_size=_MARK_BYTES).digest()


def _read(store: Store) -> tuple[set[bytes], _Failures, bool]:
    kept = store.read_side(_NAME, format=_FORMAT)
    failures = kept.get("failures", {})
    try:
        data = b64decode(kept.get("marks", ""), validate=True)
    except (ValueError, TypeError):
        data = b""
    marks = {data[at : at + _MARK_BYTES] for at in range(0, len(data), _MARK_BYTES)}
    is_whole = kept.get("whole") == store.dropped_revision()
    return marks, failures if isinstance(failures, dict) else {}, is_whole
