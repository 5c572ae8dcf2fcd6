"""The HTTP application: endpoints, and what stands before them."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers
from kvtool.serve.documents import Documents
from kvtool.serve.embeddings import Embeddings
from kvtool.serve.engine import Engine
from kvtool.serve.facts import facts_of
from kvtool.serve.guard import Guard, Patience
from kvtool.serve.metrics import Metrics
from kvtool.serve.noting import Notes
from kvtool.serve.options import ServeOptions
from kvtool.serve.wire import Refusal, briefly, failed, refused

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus'


def make_app(
    engine: Engine,
    options: ServeOptions,
    asking: QueryOptions,
    ingesting: IngestOptions,
    key: str | None,
    notes: Notes,
) -> ASGIApp:
    """Put the application together.

    Parameters
    ----------
    asking, ingesting : what holds where a client says nothing.
    key : that clients have to send; None: none.
    """
    app = Starlette(
        routes=_routes(engine, options, asking, ingesting, notes.metrics),
        middleware=[
            Middleware(Guard, key=key, origins=options.cors_origin),
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origin,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            ),
        ],
        exception_handlers={
            Refusal: _on_refusal,
            KvtoolError: _on_error,
            HTTPException: _on_http,
            ClientDisconnect: _on_left,
            Exception: _on_bug,
        },
        max_body_size=options.max_body,
    )
    known = {route.path for route in app.routes if isinstance(route, Route)}
    return notes.of(Patience(app, options.client_timeout), known)


def _routes(
    engine: Engine, options: ServeOptions, asking: QueryOptions, ingesting: IngestOptions, metrics: Metrics
) -> list[Route]:
    answers, embeddings = Answers(engine, asking, options.spot), Embeddings(engine)
    documents = Documents(engine, ingesting, options.root, options.uploads)

    async def health(request: Request) -> Response:
        return JSONResponse(await briefly(engine.status))

    async def measured(request: Request) -> Response:
        return Response(await asyncio.to_thread(metrics.text), media_type=_TEXT_FORMAT)

    return [
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.completion, methods=["POST"]),
        Route("/v1/models", answers.models),
        Route("/v1/embeddings", embeddings.embed, methods=["POST"]),
        Route("/v1/documents", documents.add, methods=["POST"]),
        Route("/v1/documents", documents.show, methods=["GET"]),
        Route("/v1/documents", documents.forget, methods=["DELETE"]),
        Route("/health", health),
        Route("/metrics", measured),
    ]


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvtoolError)
    response = failed(error)
    facts_of(request).failed(error, response.status_code)
    return response


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such address", 405: "this address knows no such method", 413: "the request is too long"}
    response = refused(Refusal(error.status_code, "http", words.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _on_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    return failed(KvtoolError(f"unexpected {type(error).__name__}", "this is a bug in kvtool"))
