"""Documents of clients: `/v1/documents`, `/v1/search`, and the folder of uploads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import stat
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtool.core.cache.layout import atomic_write, read_small
from kvtool.core.cache.store import Store
from kvtool.core.common.files import make_folder
from kvtool.core.common.text import counted
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import KvtoolError, NoSpaceError, StoreNotFoundError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.retrieval.passages import RetrievalOptions
from kvtool.core.upkeep.forget import MuchError
from kvtool.serve.engine import Engine
from kvtool.serve.job import BusyError
from kvtool.serve.options import ServeOptions
from kvtool.serve.requests import Name, Option, Part, StrictPart, Text, invalid, number_of
from kvtool.serve.wire import Refusal, body_of

_MAX_NAME = 255  # bytes, as in file systems
_NOTES = ".kvtool-sent"  # hidden: no client can name it, and no ingest reads it


def _decoded(data: Any) -> bytes:
    try:
        return b64decode(data, validate=True)
    except (ValueError, TypeError):
        raise invalid("wrong_type", "{name} is not Base64") from None


class SentDocument(StrictPart):
    name: Name
    text: str | None = None
    data: Annotated[bytes, BeforeValidator(_decoded)] | None = None

    @model_validator(mode="after")
    def _has_one_content(self) -> Self:
        if (self.text is None) is (self.data is None):
            raise invalid("wrong_type", "{name} needs either a text or data")
        return self


class DocumentsBody(StrictPart):
    documents: list[SentDocument] = []


class SearchQuery(StrictPart):
    q: Text = ""
    top_k: Annotated[Option, BeforeValidator(number_of)] = None
    min_score: Annotated[Option, BeforeValidator(number_of)] = None
    source: Option = None


class SourceQuery(Part):
    source: Name = ""
    all: Literal["true", "false"] = "false"
    exact: Literal["true", "false"] = "false"


class Documents:
    def __init__(
        self, engine: Engine, serving: ServeOptions, ingesting: IngestOptions, asking: RetrievalOptions
    ) -> None:
        self._engine, self._options, self._asking = engine, ingesting, asking
        self._uploads = Uploads(serving.uploads) if serving.uploads is not None else None

    def routes(self) -> list[Route]:
        return [
            Route("/v1/documents", self.add, methods=["POST"]),
            Route("/v1/documents", self.show, methods=["GET"]),
            Route("/v1/documents", self.forget, methods=["DELETE"]),
            Route("/v1/search", self.search),
        ]

    async def add(self, request: Request) -> Response:
        body = DocumentsBody.read(await body_of(request))
        sent = [self._sent(row) for row in body.documents]
        if len({path for path, _ in sent}) < len(sent):  # the former version of one would be the other
            raise Refusal(400, "wrong_name", "two documents have the same name", "send one of them", "documents")
        if not sent:
            raise Refusal(400, "no_documents", "there is nothing to ingest", "send documents")
        return JSONResponse(await asyncio.to_thread(self._ingest, sent))

    async def show(self, request: Request) -> Response:
        wanted = SourceQuery.read(request.query_params).source or None
        try:
            documents = await asyncio.to_thread(self._engine.documents, wanted)
        except UsageError as error:
            raise Refusal(404, "no_document", error.message, "GET /v1/documents lists them", "source") from error
        if wanted is not None and len(documents) == 1:
            return JSONResponse({"object": "document", **documents[0]})
        return JSONResponse({"object": "list", "data": [_summary(row) for row in documents]})

    async def search(self, request: Request) -> Response:
        query = request.query_params
        given = SearchQuery.read({**query} | ({"source": query.getlist("source")} if "source" in query else {}))
        if not (question := given.q.strip()):
            raise Refusal(400, "no_question", "the question is empty", "GET /v1/search?q=…", "q")
        options = replace(self._asking, **given.model_dump(exclude_unset=True, exclude={"q"}))
        return JSONResponse(await asyncio.to_thread(self._engine.search, question, options))

    async def forget(self, request: Request) -> Response:
        """`DELETE /v1/documents?source=`: forget documents, and remove the files that clients sent.

        More than half of several documents need `all=true`: a pattern soon selects more than was meant. With
        `exact=true` a name is no pattern: once it is gone, it could be one of others. Nothing is forgotten that a file
        of the uploads folder would bring back: a file that no client sent, or one with further documents.
        """
        query = SourceQuery.read(request.query_params)
        if not (source := query.source):
            raise Refusal(400, "no_document", "no document is named", "DELETE /v1/documents?source=…", "source")
        try:
            gone = await asyncio.to_thread(self._forget, source, query.all == "true", query.exact == "true")
        except MuchError as error:
            raise Refusal(409, "much", error.message, "add &all=true to do it", "all") from error
        return JSONResponse({"object": "list", "deleted": list(gone)})

    # ---- in another thread ----

    def _ingest(self, sent: list[tuple[Path, bytes]]) -> dict[str, Any]:
        files = tuple(path for path, _ in sent)
        options = replace(self._options, paths=files, roots=files)
        with nullcontext() if self._uploads is None else self._uploads.storing(sent, self._engine.has_file):
            return self._engine.ingest(options).to_json()

    def _forget(self, source: str, much: bool, exact: bool) -> tuple[str, ...]:
        def check(store: Store, going: Sequence[str]) -> None:
            if exact and source not in {*going, *map(file_of, going)}:
                raise Refusal(404, "no_document", f"document not found: {source!r}", param="source")
            if self._uploads is not None:
                self._uploads.remove_files(store, going)

        with nullcontext() if self._uploads is None else self._uploads.locked():
            try:
                return self._engine.forget(source, much, check)
            except (UsageError, StoreNotFoundError) as error:
                if self._uploads is None or isinstance(error, MuchError):
                    raise
                file = self._uploads.folder / source
                if self._engine.has_file(file) or not self._uploads.is_sent(file):
                    raise
                self._uploads.remove(file)  # an ingest could not read it, or was interrupted
                return (str(file),)

    # ---- names ----

    def _sent(self, row: SentDocument) -> tuple[Path, bytes]:
        if self._uploads is None:
            hint = "its option `uploads` names a folder for them"
            raise Refusal(403, "not_allowed", "this server takes no documents from clients", hint, "documents")
        data = (row.text or "").encode("utf-8", "replace") if row.data is None else row.data
        return self._uploads.folder / _safe_name(row.name), data


def _safe_name(name: str) -> PurePosixPath:
    """Return a name below the folder that an ingest reads, and that is not a part of another file. Raises Refusal."""
    parts = name.split("/")
    sound = all(part.strip(" .") and not part.startswith(".") and len(part.encode()) <= _MAX_NAME for part in parts)
    if not sound or "\\" in name or not name.isprintable() or file_of(name) != name:
        raise Refusal(400, "wrong_name", f"{name!r} is no name of a document", "such as notes/river.md", "documents")
    return PurePosixPath(name)


def _summary(row: Mapping[str, Any]) -> dict[str, Any]:
    chunks = row["chunks"]
    sums = {name: sum(chunk[name] for chunk in chunks) for name in ("tokens", "bytes")}
    return {**row, "chunks": len(chunks), **sums}


class Uploads:
    """Folder of documents that clients send, created if missing, with a note of the name and SHA-256 of each.

    A file belongs to clients while its note has the digest of its bytes. A file without a note, or one that was edited
    since, belongs to the server's owner: clients can neither replace nor remove it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._notes = self.folder / _NOTES

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        import filelock

        lock = filelock.FileLock(self._notes / "lock", mode=0o600, thread_local=False)
        try:
            make_folder(self._notes)
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise BusyError("documents are being written or removed") from error
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise KvtoolError(
                f"{self.folder} cannot be written: {why}", "give the server another folder for `uploads`"
            ) from error
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def storing(self, sent: Sequence[tuple[Path, bytes]], is_stored: Callable[[Path, bytes], bool]) -> Iterator[None]:
        """Keep documents during their ingest, all or none; then restore the former versions of those that it did not
        store. After an interrupted ingest all stay, for the next one."""
        interrupted = False

        def end(path: Path, data: bytes) -> None:
            self._end(path, data, interrupted or is_stored(path, data))

        with self.locked(), contextlib.ExitStack() as ends:
            for path, _ in sent:
                self.check(path)
            for path, data in sent:
                self._keep(path, data)
                ends.callback(end, path, data)
            try:
                yield
            except BaseException as error:
                interrupted = not isinstance(error, (NoSpaceError, UsageError))
                raise

    def holds(self, path: Path) -> bool:
        return path.is_relative_to(self.folder) and os.path.normpath(path) == str(path) and path != self.folder

    def check(self, path: Path) -> None:
        """Raise Refusal for a path of the folder that is, or leads through, a file or link of the owner."""
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
        return self.holds(path) and (digest := _digest(path)) != "" and digest in self._known(path)

    def _keep(self, path: Path, data: bytes) -> None:
        try:
            self._write(path, data)
        except OSError as error:
            why = (error.strerror or str(error)).lower()  # a file where a folder is named, or the other way round
            raise Refusal(400, "wrong_name", f"{path.name!r} cannot be kept: {why}", param="documents") from error

    def _end(self, path: Path, data: bytes, stays: bool) -> None:
        """Restore the former version of a document that does not stay, unless its file has changed since."""
        former = self._former(path)
        with contextlib.suppress(OSError, Refusal):
            if not stays and _digest(path) == hashlib.sha256(data).hexdigest():
                if former.exists():
                    os.replace(former, path)
                else:
                    self.remove(path)
            former.unlink(missing_ok=True)

    def remove_files(self, store: Store, going: Sequence[str]) -> None:
        """Remove the files of documents before these are forgotten: no ingest brings them back after a crash."""
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
        self.check(file)
        file.unlink(missing_ok=True)
        self._note(file).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a document. The note is written first, with the digests of the old and the new file: after a crash it
        fits the file that exists."""
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
        """Return the digests that a client's file may have; none for a link, or a missing or damaged note."""
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
        return self._note(path).with_suffix(".former")


def _digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, "" for anything else. Does not follow a link or wait for a FIFO."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (OSError, ValueError):  # a name with NUL is none
        return ""
    with open(handle, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(handle).st_mode)
        return hashlib.file_digest(file, "sha256").hexdigest() if is_file else ""
