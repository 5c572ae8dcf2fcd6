"""Access control and the limit of bodies, before every endpoint, and the log of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtool.core.agent.options import key_of
from kvtool.core.session.learned import EVERYBODY
from kvtool.serve.options import ANY_ORIGIN
from kvtool.serve.wire import Refusal, refused

OWNER = "kvtool.owner"  # in the scope of a request: the owner of what is kept of it
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def owner_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def owners_of(keys: Sequence[str] | None) -> set[str] | None:
    """Return all owners that these keys may have; None: no key is required, and an owner's may be required again."""
    return None if keys is None else {EVERYBODY, *map(owner_of, keys)}


class Guard:
    """Middleware that requires one of the keys, and notes the `OWNER` of what is kept of a request. `free`: paths that
    need no key.

    Without keys the server listens at a loopback address only, and web pages must not ask unnoticed: a request has to
    name this machine as its host (another name may lead here), and a page one of the allowed `origins`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] | None, origins: Sequence[str], free: Collection[str]) -> None:
        self._app, self._keys, self._origins, self._free = app, keys, origins, free

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
        if scope["path"] in self._free or (scope["method"] == "OPTIONS" and "origin" in headers):
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


def limited(app: ASGIApp, limit: int) -> ASGIApp:
    """Wrap an application: a body of more bytes than the limit is refused."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413)
            return message

        await app(scope, receiving, send)

    return answer
