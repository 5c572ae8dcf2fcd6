"""A proxy that knows HTTP: it lets through, counts, and answers itself where a service is to be in trouble."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from contextlib import closing

from tests.remote.object_stub import Answer, HttpServer, Request

Trouble = Callable[[Request], Answer | None]  # None: nothing is wrong with this one
_OWN = {"connection", "transfer-encoding", "content-length", "date", "server"}
BREAK = Answer(0)  # no answer at all


class Way(HttpServer):
    """An HTTP proxy before a port; `trouble` answers in its place."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.trouble: Trouble | None = None
        super().__init__()

    def answer(self, request: Request) -> Answer | None:
        answer = self.trouble(request) if self.trouble is not None else None
        return None if answer is BREAK else answer or self.forwarded(request)

    def forwarded(self, request: Request) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self._to, timeout=60)) as there:
            there.request(request.method, request.target, request.body, dict(request.headers))
            found = there.getresponse()
            body = found.read()
        headers = {name: value for name, value in found.getheaders() if name.lower() not in _OWN}
        length = found.headers["Content-Length"] if request.method == "HEAD" else str(len(body))
        return Answer(found.status, body, {**headers, "Content-Length": length or "0"})
