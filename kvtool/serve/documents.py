"""`/v1/documents`: ingest, list, forget."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.cache.layout import atomic_write, make_folder
from kvtool.core.corpus.ignoring import is_open
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.upkeep.forget import MuchError
from kvtool.serve.engine import Engine
from kvtool.serve.job import BusyError
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
        self._uploads = uploads.resolve() if uploads is not None else None
        self._roots = tuple(root.resolve() for root in roots)
        self._one = asyncio.Lock()

    async def add(self, request: Request) -> Response:
        """`POST /v1/documents`: ingest what the client sends (`documents`), or files of this machine (`paths`)."""
        value = await body_of(request)
        for name in value:
            if name not in ("documents", "paths"):
                raise Refusal(400, "unknown_parameter", f"there is no parameter {name!r}", param=name)
        named = [self._allowed(path) for path in texts(value, "paths")]
        sent = [self._sent(row) for row in taken(value, "documents", list, [])]
        if not named and not sent:
            raise Refusal(400, "no_documents", "there is nothing to ingest", "give documents, or paths")
        if self._one.locked():
            raise BusyError("another ingest is running", _SOON)
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
        """`DELETE /v1/documents?source=`: forget a document; a file that a client sent goes, too.

        More than half of several documents go with `all=true` alone: a pattern soon means more than was thought of.
        """
        source = within(request.query_params.get("source", ""), "source")
        if not source:
            raise Refusal(400, "no_document", "no document is named", "DELETE /v1/documents?source=…", "source")
        much = _is_true(request, "all")
        try:
            gone = await asyncio.to_thread(self._forget, source, much)
        except MuchError as error:
            raise Refusal(409, "much", error.message, "add &all=true to do it", "all") from error
        return JSONResponse({"object": "list", "forgotten": list(gone)})

    # ---- in another thread ----

    def _ingest(self, named: list[Path], sent: list[tuple[Path, bytes]]) -> dict[str, Any]:
        for path, data in sent:
            try:
                make_folder(path.parent)
                atomic_write(path, data)
            except OSError as error:  # a file where a folder is named, or the other way round; too long
                why = (error.strerror or str(error)).lower()
                raise Refusal(400, "wrong_name", f"{path.name!r} cannot be kept: {why}", param="documents") from error
        paths = tuple(dict.fromkeys([*named, *(path for path, _ in sent)]))
        return self._engine.ingest(replace(self._options, paths=paths)).to_json()

    def _forget(self, source: str, much: bool) -> tuple[str, ...]:
        gone = self._engine.forget(source, much)
        if self._uploads is not None:
            for each in map(Path, gone):
                if each.is_relative_to(self._uploads):
                    each.unlink(missing_ok=True)
        return gone

    # ---- what may be named ----

    def _allowed(self, text: str) -> Path:
        """A path of this machine that a client may have ingested. Others are refused alike, there or not."""
        try:
            path = Path(os.path.realpath(os.path.expanduser(text)))
        except ValueError as error:
            raise Refusal(400, "wrong_name", f"{text!r} is no path", param="paths") from error
        if not any(is_open(path, root) for root in self._roots):
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
        return self._uploads / _safe_name(row), text.encode("utf-8", "replace")


def _is_true(request: Request, name: str) -> bool:
    """A parameter of an address that is true or false. Raises Refusal."""
    found = request.query_params.get(name, "false")
    if found not in ("true", "false"):
        raise Refusal(400, "wrong_type", f"{name} is not true or false", param=name)
    return found == "true"


def _safe_name(row: Mapping[str, Any]) -> PurePosixPath:
    """A name that stays below a folder and is read by an ingest of it."""
    name = taken(row, "name", str, "")
    parts = name.split("/")
    sound = all(part.strip(" .") and not part.startswith(".") and len(part.encode()) <= _LONGEST_NAME for part in parts)
    if not sound or "\\" in name or not name.isprintable():
        raise Refusal(400, "wrong_name", f"{name!r} is no name of a document", "such as notes/river.md", "documents")
    return PurePosixPath(name)


def _summary(row: Mapping[str, Any]) -> dict[str, Any]:
    chunks = row["chunks"]
    sums = {name: sum(chunk[name] for chunk in chunks) for name in ("tokens", "bytes")}
    return {**row, "chunks": len(chunks), **sums}
