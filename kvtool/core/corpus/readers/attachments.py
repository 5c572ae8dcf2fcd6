"""Attachments of mail: each is read like a file of its name, and is a document of the mail's file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from mimetypes import MimeTypes
from pathlib import Path

from kvtool.core.corpus import readers
from kvtool.core.corpus.readers import unknown
from kvtool.core.corpus.readers.document import Document, UnreadableFile

_MOST_FILES, _MOST_BYTES = 100, 1 << 25  # that are read of one file
_MEDIA = ("image/", "audio/", "video/")
_SIGNATURES = ("application/pgp-", "application/pkcs7-signature", "application/x-pkcs7-signature")
_SEALED = b"-----BEGIN PGP MESSAGE"
_ENDINGS = MimeTypes()  # Python's own: a system's differ
_ENDINGS.add_type("text/calendar", ".ics")


class Attachments:
    """The attachments of one file, of which a bounded number is read.

    Attributes
    ----------
    unread : how many are not read that hold text or may hold some.
    """

    def __init__(self) -> None:
        self.unread = 0
        self._files, self._bytes = _MOST_FILES, _MOST_BYTES

    def read(self, prefix: str, files: Iterable[tuple[str, str, bytes]]) -> tuple[list[Document], list[str]]:
        """Read the attachments of one message.

        Parameters
        ----------
        prefix : what the sources of their documents begin with.
        files : name, type and bytes of each.

        Returns
        -------
        Their documents, and lines of the message that name them.
        """
        made: dict[str, Document] = {}
        shown: dict[str, list[str]] = {"Attachments": [], "Attachments, not read": []}
        seen: set[bytes] = set()  # an invitation may be a part and an attachment
        for number, (name, kind, data) in enumerate(files, 1):
            path = _path(name, kind, number)
            try:
                found = [] if data in seen else self._documents(path, kind, data)
            except Exception:  # whatever a library raises over it: the message is sound
                kinds = (kind, _ENDINGS.guess_type(path.name)[0] or "")
                may_hold_text = not any(each.startswith((*_MEDIA, *_SIGNATURES)) for each in kinds)
                self.unread += may_hold_text
                shown["Attachments, not read"] += [name or path.name] if name or may_hold_text else []
                continue
            seen.add(data)
            shown["Attachments"].append(name or path.name)
            for document in found:
                source = prefix + path.name + document.source[len(readers.source_of(path)) :].replace("#", "/")
                while source in made:
                    source += "'"
                made[source] = replace(document, source=source)
        return list(made.values()), [f"{title}: {', '.join(names)}" for title, names in shown.items() if names]

    def _documents(self, path: Path, kind: str, data: bytes) -> list[Document]:
        """Read one attachment. Raises UnreadableFile, and whatever libraries raise."""
        if readers.is_foreign(path) or kind.startswith(_SIGNATURES) or data.lstrip().startswith(_SEALED):
            raise UnreadableFile("holds no text that is open")
        if not self._files or len(data) > self._bytes:
            raise UnreadableFile("too many or too large attachments")
        if not readers.is_known(path):
            unknown.check(data[: unknown.SNIFFED], len(data))
        self._files, self._bytes = self._files - 1, self._bytes - len(data)
        return readers.read_documents(path, data)


def _path(name: str, kind: str, number: int) -> Path:
    """Return what an attachment is called as a file, with the ending of its type if its own is unknown."""
    label = "".join(filter(str.isprintable, name)).replace("#", "_").replace("\\", "/").rpartition("/")[2]
    path = Path("/", label or f"part {number}")
    is_clear = readers.is_known(path) or readers.is_foreign(path) or kind == "application/octet-stream"
    return path if is_clear else path.with_name(path.name + (_ENDINGS.guess_extension(kind) or ""))
