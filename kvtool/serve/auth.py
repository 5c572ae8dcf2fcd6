"""Access control and the limit of bodies, before every endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtool.core.agent.options import key_of
from kvtool.core.session.learned import EVERYBODY
from kvtool.serve.options import ANY_ORIGIN
from kvtool.serve.page import STATIC
from kvtool.serve.wire import Refusal, refused

OWNER = "kvtool.owner"  # in the scope of a request: the owner of what is kept of it
_OPEN = ("/health", *STATIC)  # for monitoring, and the page, which asks for the key
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def owner_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def owners_of(keys: Sequence[str] | None) -> set[str] | None:
    """Return all owners that these keys may have; None: no key is required, and an owner's may be required again."""
    return None if keys is None else {EVERYBODY, *map(owner_of, keys)}


class Guard:
    """Middleware that requires one of the keys, and notes the `OWNER` of what is kept of a request.

    Without keys the server listens at a loopback address only, and web pages must not ask unnoticed: a request has to
    name this machine as its host (another name may lead here), and a page one of the allowed `origins`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] | None, origins: Sequence[str]) -> None:
        self._app, self._keys, self._origins = app, keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refusal := self._refusal(scope)) is not None:
            await refused(refusal, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and not {origin, ANY_ORIGIN} & {*self._origins}:
            own = URL(scope=scope)
            if origin != f"{own.scheme}://{own.netloc}":
                hint = "the server's option `cors_origin` can allow them"
                return Refusal(403, "origin", "pages of this origin may not ask", hint)
        if self._keys is None:
            host = _host(headers)
            if host not in _LOOPBACK:
                return Refusal(403, "host", f"unexpected Host header {host!r}", "ask localhost, or start it with a key")
            return None
        if scope["path"] in _OPEN or (scope["method"] == "OPTIONS" and "origin" in headers):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")  # Anthropic's clients send it so
        if (key := key_of(given.strip(), self._keys)) is not None:
            scope[OWNER] = owner_of(key)
            return None
        hint = "send `Authorization: Bearer KEY`; the server's operator has the key (`kvtool serve` names its file)"
        return Refusal(401, "invalid_api_key", "the API key is missing or wrong", hint)


def _host(headers: Headers) -> str | None:
    """Return the host that a request names, if it is valid. Starlette's URL replaces an invalid one by this machine."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname
    except ValueError:
        return None


class BodyLimit:
    """Middleware that refuses bodies of more than `size` bytes."""

    def __init__(self, app: ASGIApp, size: int) -> None:
        self._app, self._size = app, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._size:
                raise HTTPException(413)
            return message

        await self._app(scope, receiving, send)
