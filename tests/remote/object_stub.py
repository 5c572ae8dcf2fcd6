"""A bucket of Google's or a container of Azure's, as far as kvtool speaks with them, and a web server before a folder.

No package has a server of theirs that runs without their clouds, so these answer as the services' pages say."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

PAGE = 3  # names in one answer to a list


class Request(NamedTuple):
    """A request: `target` as it was sent, `path` and `query` of it; header names are lower case."""

    method: str
    target: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def name(self) -> str:
        return unquote(self.path).lstrip("/").partition("/")[2]


class Answer(NamedTuple):
    """An answer. A length that the headers state is believed."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


BREAK = Answer(0)  # no answer at all


class HttpServer(ThreadingHTTPServer):
    """Answers each request with `answer`: None closes the connection without a word. `asked` are those that came."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer
        self.asked: list[Request] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.server_port)
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def answer(self, request: Request) -> Answer | None:
        found: Answer | None = self._answer(request)
        return found

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that go away in the middle: that is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def do_any(self) -> None:
        parts = urlsplit(self.path)
        request = Request(
            self.command,
            self.path,
            parts.path,
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(int(self.headers.get("Content-Length") or 0)),
        )
        self.server.asked.append(request)
        answer = self.server.answer(request)
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def log_message(self, *given: object) -> None: ...


class Way(HttpServer):
    """An HTTP proxy before a port: it counts, and `trouble` answers in the port's place where it returns an answer."""

    trouble: Callable[[Request], Answer | None] | None = None

    def __init__(self, to: int) -> None:
        self._to = to
        super().__init__()

    def answer(self, request: Request) -> Answer | None:
        answer = self.trouble(request) if self.trouble is not None else None
        return None if answer is BREAK else answer or self.forwarded(request)

    def forwarded(self, request: Request) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self._to, timeout=60)) as there:
            there.request(request.method, request.target, request.body, dict(request.headers))
            found = there.getresponse()
            body = found.read()
        own = {"connection", "transfer-encoding", "content-length", "date", "server"}
        headers = {name: value for name, value in found.getheaders() if name.lower() not in own}
        length = found.headers["Content-Length"] if request.method == "HEAD" else str(len(body))
        return Answer(found.status, body, {**headers, "Content-Length": length or "0"})


Serve = Callable[[Callable[[Request], Answer | None]], HttpServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(closing(HttpServer(answer)))


class TcpServer:
    """Serves each client in a thread, with :meth:`serve`."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError):
            self.serve(client)

    def serve(self, client: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for one in (self._server, *self._clients):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def value_answer(request: Request, value: bytes, headers: Mapping[str, str]) -> Answer:
    """Answer with a value, or with the part of it that was asked for."""
    headers = {**headers, "Last-Modified": formatdate(usegmt=True), "Content-Length": str(len(value))}
    if request.method == "HEAD":
        return Answer(200, headers=headers)
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range") or request.headers.get("x-ms-range") or "")
    if not asked:
        return Answer(200, value, headers)
    start, stop = int(asked[1]), min(int(asked[2]) + 1, len(value))
    if start >= len(value):
        return Answer(416)
    part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(value)}", "Content-Length": str(stop - start)}
    return Answer(206, value[start:stop], {**headers, **part})


class WebServer(HttpServer):
    """Files below a folder, at `/kv`, in parts or whole."""

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self._folder, self._ranges = folder, ranges
        super().__init__()

    def answer(self, request: Request) -> Answer:
        path = self._folder / request.name
        if request.method not in ("GET", "HEAD"):
            return Answer(405)
        if not request.path.startswith("/kv/") or not path.is_file():
            return Answer(404)
        return value_answer(request if self._ranges else request._replace(headers={}), path.read_bytes(), {})


class ObjectServer(HttpServer):
    """Objects in memory. Those of `bucket` are there, no other bucket is."""

    missing_bucket = ""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}  # value, version
        self._version, self._one = 0, threading.Lock()
        super().__init__()

    def answer(self, request: Request) -> Answer:
        with self._one:
            if unquote(request.path).strip("/").partition("/")[0] != "bucket":
                return Answer(404, f"<Error><Code>{self.missing_bucket}</Code></Error>".encode())
            if not request.name:
                return self._of_bucket(request)
            return self._of_object(request)

    def _of_object(self, request: Request) -> Answer:
        if request.method == "PUT":
            if not self._may_replace(request):
                return Answer(412)
            self._version = max(self._version + 1, int(time.time() * 1e6))  # which is the object's time, too
            self.objects[request.name] = request.body, self._version
            return Answer(201, headers=self._tags(self._version))
        if request.name not in self.objects:
            return Answer(404, b"" if request.method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
        if request.method == "DELETE":
            del self.objects[request.name]
            return Answer(202)
        value, version = self.objects[request.name]
        return value_answer(request, value, self._tags(version))

    def _page(self, request: Request, after: str) -> tuple[list[str], str]:
        """Return some names, and the mark by which the next are asked for."""
        names = sorted(name for name in self.objects if name.startswith(request.query.get("prefix", "")))
        left = [name for name in names if name > after]
        return left[:PAGE], left[PAGE - 1] if len(left) > PAGE else ""

    def _tags(self, version: int) -> dict[str, str]:
        return {"ETag": f'"{version}"'}

    def _may_replace(self, request: Request) -> bool:
        raise NotImplementedError

    def _of_bucket(self, request: Request) -> Answer:
        raise NotImplementedError


class GoogleServer(ObjectServer):
    """As the XML interface of Cloud Storage."""

    missing_bucket = "NoSuchBucket"

    def _tags(self, version: int) -> dict[str, str]:
        return {**super()._tags(version), "x-goog-generation": str(version)}

    def _may_replace(self, request: Request) -> bool:
        wanted = request.headers.get("x-goog-if-generation-match")
        return wanted is None or int(wanted) == self.objects.get(request.name, (b"", 0))[1]

    def _of_bucket(self, request: Request) -> Answer:
        names, more = self._page(request, request.query.get("continuation-token", ""))
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name][0])}</Size><ETag>1</ETag>"
            f"<LastModified>{datetime.fromtimestamp(self.objects[name][1] / 1e6, UTC).isoformat()}</LastModified>"
            "</Contents>"
            for name in names
        )
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        return Answer(200, f"<ListBucketResult>{rows}{token}</ListBucketResult>".encode())


class AzureServer(ObjectServer):
    """As the Blob service."""

    missing_bucket = "ContainerNotFound"

    def _may_replace(self, request: Request) -> bool:
        there = self.objects.get(request.name)
        if request.headers.get("if-none-match") == "*":
            return there is None
        wanted = request.headers.get("if-match")
        return wanted is None or (there is not None and wanted == self._tags(there[1])["ETag"])

    def _of_bucket(self, request: Request) -> Answer:
        if request.query.get("comp") == "batch":
            return self._batch(request)
        names, more = self._page(request, request.query.get("marker", ""))
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties>"
            f"<Last-Modified>{formatdate(self.objects[name][1] / 1e6, usegmt=True)}</Last-Modified>"
            f"<Content-Length>{len(self.objects[name][0])}</Content-Length><Etag>1</Etag>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name in names
        )
        body = f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
        return Answer(200, body.encode())

    def _batch(self, request: Request) -> Answer:
        parts = []
        for number, asked in enumerate(re.findall(rb"^DELETE (\S+) HTTP/1.1", request.body, re.M)):
            name = unquote(urlsplit(asked.decode()).path).lstrip("/").partition("/")[2]
            status = "202 Accepted" if self.objects.pop(name, None) else "404 The specified blob does not exist."
            head = f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 {status}\r\nx-ms-request-id: {number}\r\n\r\n")
        return Answer(202, ("".join(parts) + "--b--\r\n").encode(), {"Content-Type": "multipart/mixed; boundary=b"})
