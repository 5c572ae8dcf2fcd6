"""Applications of a server: the HTTP API, the page, and the local client's at the Unix socket next to the store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from kvtool.core.checkpoint.files import looks_local
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request as Question
from kvtool.serve.answers import Answers, Dialect, EventStream, json_line, stream
from kvtool.serve.anthropic import anthropic_routes
from kvtool.serve.auth import OWNER, Guard, limited, owner_of
from kvtool.serve.documents import Documents
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, BusyError
from kvtool.serve.metrics import Log, Metrics, logged, stats_of
from kvtool.serve.ollama import Ollama
from kvtool.serve.openai import OpenAI
from kvtool.serve.options import ServeOptions
from kvtool.serve.requests import Names, Part, Text
from kvtool.serve.responses import Responses
from kvtool.serve.unix_socket import PATH, placed
from kvtool.serve.wire import Refusal, body_of, briefly, failed, refused

_FOLDER = Path(__file__).parent / "static"
STATIC = ("/", *sorted(f"/page/{file.name}" for file in _FOLDER.iterdir() if file.suffix != ".html"))
"""Addresses that need no key: their files are the same for everybody, and contain nothing of a store."""

# Only files of this server are loaded, nothing in the HTML is run, and no text can become HTML by accident.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

_MANY = 2001  # documents whose list takes seconds


def page_routes(engine: Engine, options: ServeOptions) -> list[BaseRoute]:
    def read_state() -> dict[str, Any]:
        return {
            **engine.status(),
            "ingest": engine.ingesting.progress,
            "many": engine.has_documents(_MANY),
            "uploads": options.uploads is not None,
            "max_body": options.max_body,
            "fusions": list(FUSIONS),
        }

    async def state(request: Request) -> Response:
        return JSONResponse(await briefly(read_state), headers={"Cache-Control": "no-store"})

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    files = _Files(directory=_FOLDER)
    return [Route("/", index), Route("/page/state", state), Mount("/page", files)]


class _Files(StaticFiles):
    def file_response(self, *given: Any, **more: Any) -> Response:
        response = super().file_response(*given, **more)
        response.headers.update(_HEADERS)
        return response


_HTTP_ERRORS = {
    404: "there is no such address",
    405: "this address knows no such method",
    413: "the request is too long",
}
_CLIENT = "shell"  # its name in the log


def make_app(
    engine: Engine,
    options: ServeOptions,
    asking: QueryOptions,
    ingesting: IngestOptions,
    keys: Sequence[str] | None,
    log: Log,
) -> ASGIApp:
    answers, metrics = Answers(engine, asking, options), Metrics(engine)
    openai = OpenAI(answers)

    async def health(request: Request) -> Response:
        return JSONResponse(await briefly(engine.status))

    async def show_metrics(request: Request) -> Response:
        if keys is not None and options.isolate and request.scope[OWNER] != owner_of(keys[0]):
            hint = "ask with the first key of the server's key file"
            raise Refusal(403, "not_first_key", "the metrics show sums over all keys", hint)
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        *openai.routes(),
        *Responses(answers).routes(),
        *anthropic_routes(answers),
        *Ollama(answers, openai).routes(),
        *Documents(engine, options, ingesting, asking).routes(),
        Route("/health", health),
        Route("/metrics", show_metrics),
        *page_routes(engine, options),
    ]
    metrics.paths.update(route.path for route in routes if isinstance(route, Route))

    def note(row: dict[str, Any]) -> None:
        metrics.count(row)
        log(row)

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, keys=keys, origins=options.cors_origin, free=("/health", *STATIC)),
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origin,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            ),
        ],
        exception_handlers=_HANDLERS,
    )
    return logged(limited(app, options.max_body), note)


async def _on_error(request: Request, error: Exception) -> Response:
    scope = request.scope
    if isinstance(error, Refusal):
        return refused(error, scope)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        said = _HTTP_ERRORS.get(error.status_code, error.detail)
        response = refused(Refusal(error.status_code, "http", said), scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # of several routes of one path, the error names the methods of the first only
            same = [route for route in request.app.routes if route.matches(scope)[0] is Match.PARTIAL]
            response.headers["Allow"] = ", ".join(sorted({method for route in same for method in route.methods}))
        return response
    if not isinstance(error, KvtoolError):
        return failed(KvtoolError(f"unexpected {type(error).__name__}", "this is a bug in kvtool"), scope)
    response = failed(error, scope)
    stats_of(request).failed(error, response.status_code)
    return response


_HANDLERS = dict.fromkeys((Refusal, KvtoolError, HTTPException, ClientDisconnect, Exception), _on_error)


# ---- the local client ----


class ShellQuestion(Part):
    """A question of `kvtool query`; `folder`: where it runs."""

    question: Text
    chunks: Names = []
    documents: Names = []
    options: dict[str, Any] = {}
    model: dict[str, Any] = {}
    folder: str = ""

    def names_the_same(self) -> bool:
        """Return True if file names mean the same here: both processes run in one folder, or no name is relative."""
        embedder = self.options.get("embedder")
        models = [embedder] if embedder and (looks_local(embedder) or os.path.exists(embedder)) else []
        return all(map(os.path.isabs, [*self.chunks, *self.documents, *models])) or self.folder == os.getcwd()

    def ask(self) -> Ask:
        question = Question(self.question, tuple(self.chunks), tuple(self.documents))
        try:
            return Ask(question, QueryOptions.of(self.options), client=(_CLIENT, ""))
        except UsageError as error:  # options of another version, or of plugins that this process lacks
            raise Refusal(409, "other_options", error.message, error.hint) from error


class ShellResponse(Dialect):
    """Lines of an answer as it is generated. One that is refused as busy has no end: the shell answers by itself."""

    media_type: ClassVar[str] = "application/x-ndjson"
    is_raw: ClassVar[bool] = True

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {"answer": {name: getattr(answer, name) for name in ("text", "facts", "steps", "stepper", "warnings")}}

    def piece(self, text: str) -> Iterator[str]:
        yield json_line({"text": text})

    def waiting(self) -> str:
        return json_line({})

    def end(self, answer: Answer) -> Iterator[str]:
        yield json_line(self.whole(answer))

    def failed(self, error: KvtoolError) -> Iterator[str]:
        if not isinstance(error, BusyError):
            yield json_line({"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}})


def local_app(engine: Engine, log: Log) -> ASGIApp:
    """Make the application for this user's `kvtool query`, with all of its options."""

    async def query(request: Request) -> Response:
        asked = ShellQuestion.read(await body_of(request))
        if not _is_same_model(engine.model, asked.model):
            raise Refusal(409, "another_model", "another model is loaded here, or elsewhere")
        if not asked.names_the_same():
            raise Refusal(409, "another_folder", "names of files are read from another folder here")
        events = stream(engine, asked.ask(), ShellResponse(), stats_of(request))
        return EventStream(await anext(events), events, ShellResponse.media_type)

    app = Starlette(routes=[Route(PATH, query, methods=["POST"])], exception_handlers=_HANDLERS)
    return logged(app, log, _CLIENT)


def _is_same_model(loaded: ModelOptions, model: Mapping[str, Any]) -> bool:
    plain, own = ModelOptions(), replace(loaded, model=placed(loaded.model))
    return all(model.get(name) in (getattr(plain, name), getattr(own, name)) for name in ("model", "device", "dtype"))
