"""JSON of requests with its limits, and errors as clients of each API expect them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import (
    KvtoolError,
    NoDocumentsError,
    NoSpaceError,
    NothingFoundError,
    RemoteError,
    StoreLockedError,
    StoreNotFoundError,
    UsageError,
    replace_flags,
)
from kvtool.serve.job import RETRY_AFTER, BusyError, EndedError, LeftError, TooSlowError

# Limits of a request, checked before any work is done; listed in `kvtool help server`.
LONGEST_TEXT = 10**6  # characters of a question, an instruction, an answer
LONGEST_NAME = 4096  # characters of a name: of documents, chunks, models, users, options
MOST_NAMES = 256  # in a list of them
_MAX_VALUES = 10**5  # of JSON, names of fields included
_MAX_DEPTH = 64  # brackets in brackets
_MAX_MESSAGE = 2000  # characters of an error, which may repeat what was sent
# A JSON string, or the rest after an unmatched quotation mark.
_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKET = re.compile(r"[^\[\]{}]++")
_UNTYPED = ("", "application/x-www-form-urlencoded")
_SHORT_BODY = 1 << 16  # bytes whose parsing takes no time

# Threads for short work, which then does not wait for embeddings and ingests in the loop's own threads.
_BRIEF = ThreadPoolExecutor(4, "kvtool-brief")
T = TypeVar("T")
# Status and code of an error, by the first class that matches.
_MEANINGS: tuple[tuple[type[KvtoolError], int, str], ...] = (
    (BusyError, 429, "busy"),
    (TooSlowError, 504, "timeout"),
    (EndedError, 503, "ending"),
    (LeftError, 499, "left"),
    (NothingFoundError, 404, "nothing_found"),
    (NoDocumentsError, 404, "no_documents"),
    (UsageError, 400, "invalid_request"),
    (StoreNotFoundError, 503, "no_store"),
    (StoreLockedError, 503, "store_locked"),
    (NoSpaceError, 507, "no_space"),
    (RemoteError, 502, "shared_store"),
    (KvtoolError, 500, "failed"),
)
_TYPES = {429: "rate_limit_error", 499: "client_error", 504: "timeout_error"}


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint, self.param = status, code, message, hint, param

    @classmethod
    def of(cls, error: KvtoolError) -> Refusal:
        status, code = next((status, code) for kind, status, code in _MEANINGS if isinstance(error, kind))
        return cls(status, code, error.message, error.hint)

    def to_json(self) -> dict[str, Any]:
        """The message includes the hint: clients show nothing else. Flags are named as requests have them."""
        said = (scrubbed(shortened(text)) for text in (self.message, self.hint))
        message, hint = map(replace_flags, said)
        param = self.param and shortened(self.param).encode("utf-8", "replace").decode()  # a name that the client gave
        text = f"{message} ({hint})" if hint else message
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": text, "type": kind, "code": self.code, "param": param, "hint": hint}


def shortened(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


ANTHROPIC_PATH = "/v1/messages"
VERSION = "anthropic-version"  # the header of its API's version, which its clients send
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_body(refusal: Refusal, path: str) -> dict[str, Any]:
    said = refusal.to_json()
    if path.startswith(ANTHROPIC_PATH):
        kind = _ANTHROPIC.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": said["message"]}}
    return {"error": said["message"] if path.startswith("/api/") else said}


def refused(refusal: Refusal, scope: Scope) -> JSONResponse:
    path = ANTHROPIC_PATH if VERSION in Headers(scope=scope) else scope["path"]
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
    return JSONResponse(error_body(refusal, path), refusal.status, headers)


def failed(error: KvtoolError, scope: Scope) -> JSONResponse:
    response = refused(Refusal.of(error), scope)
    if isinstance(error, (BusyError, StoreLockedError, EndedError)):
        response.headers["Retry-After"] = str(RETRY_AFTER)
    return response


async def body_of(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Without a type, or with that of a form, a web page could ask unnoticed; programs and `curl -d` name no origin.
    if kind != "application/json" and (kind not in _UNTYPED or "origin" in request.headers):
        raise Refusal(415, "not_json", "the body has to be JSON", "send Content-Type: application/json")
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refusal(415, "encoded", f"unsupported Content-Encoding: {coding[:LONGEST_NAME]}", "send it uncompressed")
    data = await request.body()
    return _parsed(data) if len(data) <= _SHORT_BODY else await briefly(lambda: _parsed(data))


async def briefly(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_BRIEF, work)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
        check_shape(text)
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, parse_int=_whole, object_pairs_hook=_once
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a pair of surrogates
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "not_json", f"invalid JSON: {error}", "send one JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise Refusal(400, "not_json", "the body is not a JSON object", 'such as {"messages": […]}')
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _whole(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{text[:20]}… is too large")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a repeated name would silently lose a value."""
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise ValueError(f"{name[:LONGEST_NAME]!r} appears twice")
        value[name] = each
    return value


def check_shape(text: str) -> None:
    plain = _TEXT.sub('""', text)
    if plain.count(",") + plain.count("[") + plain.count("{") > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    depth = 0
    for letter in _NO_BRACKET.sub("", plain):
        depth += 1 if letter in "[{" else -1
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")


def parsed_json(text: str) -> Any:
    """Parse what a model has written. Raises ValueError."""
    check_shape(text)
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half a pair of surrogates, too
    return value
