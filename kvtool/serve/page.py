"""Page of the server for a browser: its static files, and the state that it shows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.ingest.options import IngestOptions
from kvtool.serve.engine import Engine
from kvtool.serve.options import ServeOptions
from kvtool.serve.wire import briefly

_FOLDER = Path(__file__).parent / "static"
_FILES = {  # file and type by address
    "/": ("index.html", "text/html; charset=utf-8"),
    **{
        f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("app", "answer", "documents", "elements", "ko", "server", "text")
    },
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
STATIC = (*_FILES,)
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


def page_routes(engine: Engine, options: ServeOptions, ingesting: IngestOptions) -> list[Route]:
    def read_state() -> dict[str, Any]:
        return {
            **engine.status(),
            "ingest": engine.ingesting.progress,
            "prefill": engine.prefill_speed(ingesting),
            "many": engine.has_documents(_MANY),
            "uploads": options.uploads is not None,
            "max_body": options.max_body,
            "fusions": list(FUSIONS),
        }

    async def state(request: Request) -> Response:
        return JSONResponse(await briefly(read_state), headers={"Cache-Control": "no-store"})

    files = [Route(address, _static(name, kind)) for address, (name, kind) in _FILES.items()]
    return [*files, Route("/page/state", state)]


def _static(name: str, kind: str) -> Any:
    data = (_FOLDER / name).read_bytes()
    headers = {**_HEADERS, "Content-Type": kind, "ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"'}

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers)

    return file
