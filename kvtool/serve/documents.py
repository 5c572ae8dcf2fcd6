"""`/v1/documents`: ingest, list, forget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.corpus.ignoring import Roots
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import NoSpaceError, StoreNotFoundError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.upkeep.forget import MuchError
from kvtool.serve.engine import Engine
from kvtool.serve.job import BusyError
from kvtool.serve.uploads import Uploads
from kvtool.serve.wire import Refusal, body_of, taken, texts, within

_LONGEST_NAME = 255  # bytes, as file systems have it
_LONGEST_DOCUMENT = 10**9  # characters: --max-body is less
_SOON = 5  # seconds


class Documents:
    """The endpoints of documents.

    Parameters
    ----------
    roots : folders below which clients may name files; `uploads`: where what they send is kept.
    """

    def __init__(self, engine: Engine, options: IngestOptions, roots: tuple[Path, ...], uploads: Path | None) -> None:
        self._engine, self._options = engine, options
        self._uploads = Uploads(uploads) if uploads is not None else None
        self._roots = tuple(root.resolve() for root in roots)
        self._one = asyncio.Lock()

    async def add(self, request: Request) -> Response:
        """`POST /v1/documents`: ingest what the client sends (`documents`), or files of this machine (`paths`)."""
        value = await body_of(request)
        for name in value:
            if name not in ("documents", "paths"):
                raise Refusal(400, "unknown_parameter", f"there is no parameter {name!r}", param=name)
        named = await asyncio.to_thread(self._named, texts(value, "paths"))
        sent = [self._sent(row) for row in taken(value, "documents", list, [])]
        if not named and not sent:
            raise Refusal(400, "no_documents", "there is nothing to ingest", "give documents, or paths")
        self._check_free()
        async with self._one:
            report = await asyncio.to_thread(self._ingest, named, sent)
        return JSONResponse(report)

    async def show(self, request: Request) -> Response:
        """`GET /v1/documents`: all of them; with `?source=` the one that it means, with its chunks, or those."""
        wanted = within(request.query_params.get("source"), "source")
        try:
            documents = await asyncio.to_thread(self._engine.documents, wanted)
        except UsageError as error:
            raise Refusal(404, "no_document", error.message, "GET /v1/documents lists them", "source") from error
        if wanted is not None and len(documents) == 1:
            return JSONResponse({"object": "document", **documents[0]})
        return JSONResponse({"object": "list", "data": [_summary(row) for row in documents]})

    async def forget(self, request: Request) -> Response:
        """`DELETE /v1/documents?source=`: forget a document; a file that a client sent is removed with it.

        More than half of several documents go with `all=true` alone: a pattern soon means more than was thought of.
        Nothing is forgotten where a file of the uploads folder would bring it back: one that no client sent, or one
        that holds further documents.
        """
        source = within(request.query_params.get("source", ""), "source")
        if not source:
            raise Refusal(400, "no_document", "no document is named", "DELETE /v1/documents?source=…", "source")
        much = _is_true(request, "all")
        self._check_free()
        try:
            async with self._one:
                gone = await asyncio.to_thread(self._forget, source, much)
        except MuchError as error:
            raise Refusal(409, "much", error.message, "add &all=true to do it", "all") from error
        return JSONResponse({"object": "list", "forgotten": list(gone)})

    def _check_free(self) -> None:
        """Raise BusyError while another request writes or removes documents: a thread that waits is one fewer."""
        if self._one.locked():
            raise BusyError("documents are being written or removed", _SOON)

    # ---- in another thread ----

    def _ingest(self, named: list[Path], sent: list[tuple[Path, bytes]]) -> dict[str, Any]:
        files = tuple(path for path, _ in sent)
        paths = tuple(dict.fromkeys((*named, *files)))
        with self._held():
            options = replace(self._options, paths=paths, roots=(*self._roots, *files))
            if self._uploads is None:
                return self._engine.ingest(options).to_json()
            self._uploads.keep(sent)
            try:
                return self._engine.ingest(options).to_json()
            except NoSpaceError:
                self._uploads.undo([(path, data) for path, data in sent if not self._engine.has_file(path, data)])
                raise
            finally:
                self._uploads.settle(sent)

    def _forget(self, source: str, much: bool) -> tuple[str, ...]:
        with self._held():
            if self._uploads is None:
                return self._engine.forget(source, much)
            try:
                return self._engine.forget(source, much, self._uploads.remove_files)
            except (UsageError, StoreNotFoundError) as error:
                file = self._uploads.folder / source
                if isinstance(error, MuchError) or self._engine.has_file(file) or not self._uploads.is_sent(file):
                    raise
                self._uploads.remove(file)  # an ingest could not read it, or was stopped before
                return (str(file),)

    def _held(self) -> AbstractContextManager[None]:
        return nullcontext() if self._uploads is None else self._uploads.locked()

    # ---- what may be named ----

    def _named(self, paths: Sequence[str]) -> list[Path]:
        roots = Roots(self._roots)
        return [self._allowed(path, roots) for path in paths]

    def _allowed(self, text: str, roots: Roots) -> Path:
        """A path of this machine that a client may have ingested. Others are refused alike, there or not."""
        try:
            path = Path(os.path.realpath(os.path.expanduser(text)))
        except ValueError as error:
            raise Refusal(400, "wrong_name", f"{text!r} is no path", param="paths") from error
        if not roots.show(path):
            hint = (
                "start the server with --root FOLDER"
                if not self._roots
                else "name one below a --root: nothing hidden, no secret, nothing that ignore files name"
            )
            raise Refusal(403, "not_allowed", f"{text!r} may not be ingested from here", hint, "paths")
        return path

    def _sent(self, row: Any) -> tuple[Path, bytes]:
        """The place and the bytes of a document that a client sends."""
        if self._uploads is None:
            hint = "start it with --uploads FOLDER"
            raise Refusal(403, "not_allowed", "this server takes no documents from clients", hint, "documents")
        if not isinstance(row, dict) or set(row) != {"name", "text"}:
            raise Refusal(400, "wrong_type", "a document has a name and a text", param="documents")
        text: str = taken(row, "text", str, "", _LONGEST_DOCUMENT)
        return self._uploads.folder / _safe_name(row), text.encode("utf-8", "replace")


def _is_true(request: Request, name: str) -> bool:
    """A parameter of an address that is true or false. Raises Refusal."""
    found = request.query_params.get(name, "false")
    if found not in ("true", "false"):
        raise Refusal(400, "wrong_type", f"{name} is not true or false", param=name)
    return found == "true"


def _safe_name(row: Mapping[str, Any]) -> PurePosixPath:
    """A name that stays below a folder, is read by an ingest of it, and is not that of a part of another file."""
    name = taken(row, "name", str, "")
    parts = name.split("/")
    sound = all(part.strip(" .") and not part.startswith(".") and len(part.encode()) <= _LONGEST_NAME for part in parts)
    if not sound or "\\" in name or not name.isprintable() or file_of(name) != name:
        raise Refusal(400, "wrong_name", f"{name!r} is no name of a document", "such as notes/river.md", "documents")
    return PurePosixPath(name)


def _summary(row: Mapping[str, Any]) -> dict[str, Any]:
    chunks = row["chunks"]
    sums = {name: sum(chunk[name] for chunk in chunks) for name in ("tokens", "bytes")}
    return {**row, "chunks": len(chunks), **sums}
