"""Uploaded documents: which files of a folder clients have sent, so that no other file is written or removed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtool.core.cache.layout import atomic_write, read_small
from kvtool.core.cache.store import Store
from kvtool.core.common.files import make_folder
from kvtool.core.common.sizes import counted
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import KvtoolError
from kvtool.serve.job import BusyError
from kvtool.serve.wire import Refusal

_NOTES = ".kvtool-sent"  # hidden: no client can name it, and no ingest reads it
_SOON = 5  # seconds


class Uploads:
    """A folder of documents that clients send, with a note of the name and the SHA-256 of each.

    A file is a client's while its note has the digest of its bytes. A file without a note, or one that was edited since
    a client sent it, is the owner's: clients can neither replace nor remove it.

    Parameters
    ----------
    folder : the folder, which is made on need.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._notes = self.folder / _NOTES

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, so that no other request or server writes or removes a document meanwhile.

        Raises
        ------
        BusyError : another request, or another server with the same folder, holds it.
        KvtoolError : the folder cannot be written.
        """
        import filelock

        lock = filelock.FileLock(self._notes / "lock", mode=0o600, thread_local=False)
        try:
            make_folder(self._notes)
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise BusyError("documents are being written or removed", _SOON) from error
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise KvtoolError(f"{self.folder} cannot be written: {why}", "serve with another --uploads") from error
        try:
            yield
        finally:
            lock.release()

    def holds(self, path: Path) -> bool:
        """Return True if a path, as it is spelled, is of a document below the folder."""
        return path.is_relative_to(self.folder) and os.path.normpath(path) == str(path) and path != self.folder

    def check(self, path: Path) -> None:
        """Refuse a path of the folder at which the owner has a file, a link, or a link on the way to it.

        Raises
        ------
        Refusal : a client can neither write nor remove what is stored there.
        """
        if os.path.realpath(path) == str(path) and (os.path.isdir(path) or not os.path.lexists(path)):
            return
        if not (known := self._known(path)):
            why = "is a file that no client has sent"
        elif _digest(path) not in known:
            why = "has changed since a client sent it"
        else:
            return
        raise Refusal(403, "not_sent", f"{str(path)!r} {why}", "choose another name; the server's owner can remove it")

    def is_sent(self, path: Path) -> bool:
        """Return True if the file at a path is there, and just as a client has sent it."""
        return self.holds(path) and (digest := _digest(path)) != "" and digest in self._known(path)

    def keep(self, sent: Sequence[tuple[Path, bytes]]) -> None:
        """Store documents, in the place of what clients sent under their names; nothing where one is refused.

        What was there before is kept until `settle` or `undo` is called with the same documents.

        Raises
        ------
        Refusal : see `check`; or the file system has no place for such a name.
        NoSpaceError : the disk is full.
        """
        for path, _ in sent:
            self.check(path)
        for index, (path, data) in enumerate(sent):
            try:
                self._write(path, data)
            except (OSError, KvtoolError, Refusal) as error:
                self.undo(sent[:index])
                if not isinstance(error, OSError):
                    raise
                why = (error.strerror or str(error)).lower()  # a file where a folder is named, or the other way round
                raise Refusal(400, "wrong_name", f"{path.name!r} cannot be kept: {why}", param="documents") from error

    def settle(self, sent: Sequence[tuple[Path, bytes]]) -> None:
        """Let go of what was there before documents were kept."""
        for path, _ in sent:
            with contextlib.suppress(OSError):
                self._former(path).unlink(missing_ok=True)

    def undo(self, sent: Sequence[tuple[Path, bytes]]) -> None:
        """Bring back what was there before documents were kept. A file that has changed since is left alone."""
        for path, data in reversed(sent):
            former = self._former(path)
            with contextlib.suppress(OSError, Refusal):
                if _digest(path) != hashlib.sha256(data).hexdigest():
                    former.unlink(missing_ok=True)
                elif former.exists():
                    os.replace(former, path)
                else:
                    self.remove(path)

    def remove_files(self, store: Store, going: Sequence[str]) -> None:
        """Remove the files of documents that are about to be forgotten. Documents of other folders have none here.

        The files come first: if the server is killed in between, no document is called forgotten whose text an ingest
        of the folder would bring back.

        Raises
        ------
        Refusal : see `check`; or a file holds further documents, which would go with it.
        """
        named = (Path(file) for file in sorted({file_of(source) for source in going}))
        files = [file for file in named if self.holds(file) and os.path.lexists(file) and not os.path.isdir(file)]
        for file in files:
            self.check(file)
            entry = store.file(str(file))
            if entry is not None and (staying := set(entry.documents) - set(going)):
                text = (
                    f"{str(file)!r} holds {counted(len(staying), 'further document')}, which would be forgotten with it"
                )
                raise Refusal(409, "part_of_file", text, "name the file to forget all of it, or send it anew", "source")
        for file in files:
            self.remove(file)

    def remove(self, file: Path) -> None:
        """Remove a document's file, then its note. Raises Refusal as `check` does."""
        self.check(file)
        file.unlink(missing_ok=True)
        self._note(file).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a document. The note comes first, and goes on naming the old file: whenever the server is killed, the
        note fits the file that is there."""
        self.check(path)
        make_folder(path.parent)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        digests = {hashlib.sha256(data).hexdigest(), _digest(path)} - {""}
        if path.exists():
            atomic_write(self._former(path), path.read_bytes())
        else:
            self._former(path).unlink(missing_ok=True)  # of a server that was killed
        note = {"name": self._name(path), "sha256": sorted(digests)}
        atomic_write(self._note(path), json.dumps(note).encode() + b"\n")
        atomic_write(path, data)

    def _known(self, path: Path) -> frozenset[str]:
        """Digests that a client's file may have; none where the path leads elsewhere, or nothing sound is noted."""
        if os.path.realpath(path) != str(path):
            return frozenset()
        try:
            note = json.loads(read_small(self._note(path)))
            return frozenset(map(str, note["sha256"])) if note["name"] == self._name(path) else frozenset()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, KvtoolError):
            return frozenset()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _note(self, path: Path) -> Path:
        return self._notes / (hashlib.sha256(os.fsencode(self._name(path))).hexdigest() + ".json")

    def _former(self, path: Path) -> Path:
        """Return the place of what a document is replacing, while its ingest runs."""
        return self._note(path).with_suffix(".former")


def _digest(path: Path) -> str:
    """SHA-256 of a regular file's bytes in hex; "" for anything else. Neither follows a link nor waits for a FIFO."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (OSError, ValueError):  # a name with NUL is none
        return ""
    with open(handle, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(handle).st_mode)
        return hashlib.file_digest(file, "sha256").hexdigest() if is_file else ""
