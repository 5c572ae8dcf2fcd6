"""Log and metrics of each request, on every socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtool.serve.engine import Engine
from kvtool.serve.facts import facts_of
from kvtool.serve.job import EndedError
from kvtool.serve.metrics import Metrics
from kvtool.serve.wire import failed


class Notes:
    """Log and metrics of all requests to a server.

    Parameters
    ----------
    log : called with the line of each request.
    """

    def __init__(self, engine: Engine, log: Callable[[dict[str, Any]], None]) -> None:
        self.metrics, self._log = Metrics(engine), log

    def of(self, app: ASGIApp, known: Collection[str], client: str | None = None) -> ASGIApp:
        """An application, its requests noted.

        Parameters
        ----------
        known : paths of its endpoints, which are counted by themselves.
        client : what those who ask are called in the log; None: their addresses.
        """

        def note(scope: Scope) -> None:
            facts, address = facts_of(HTTPConnection(scope)), scope.get("client")
            self.metrics.count(scope["path"] if scope["path"] in known else "other", facts)
            name = client or (address[0] if address else "")
            self._log(facts.row(scope["method"], scope["path"], name))

        return Noted(app, note)


class Noted:
    """Notes what became of each request.

    Parameters
    ----------
    note : called with a request's scope when it has ended.
    """

    def __init__(self, app: ASGIApp, note: Callable[[Scope], None]) -> None:
        self._app, self._note = app, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = facts_of(HTTPConnection(scope))

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", facts.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except OSError:  # the client has left: there is nobody to tell
            facts.status = 499
        except asyncio.CancelledError:  # the server has waited for it as long as it may
            begun, error = facts.status != 0, EndedError("the server ends before this was done", "ask again")
            facts.failed(error, 503)
            if begun:
                raise
            await failed(error)(scope, receive, sending)
        finally:
            self._note(scope)
