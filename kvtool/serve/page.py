"""Page of the server for a browser: its static files, and the state that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from kvtool.core.fusion.selectors import FUSIONS
from kvtool.serve.engine import Engine
from kvtool.serve.options import ServeOptions
from kvtool.serve.wire import briefly

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
