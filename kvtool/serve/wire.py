"""JSON in and out of requests, and errors as clients of the OpenAI API expect them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import (
    KvtoolError,
    NoSpaceError,
    NothingFoundError,
    RemoteError,
    StoreLockedError,
    StoreNotFoundError,
    UsageError,
)
from kvtool.serve.job import BusyError, EndedError, LeftError, TooSlowError

# Most of what a request may bring, looked at before anything is done with it: docs/server.md names them.
LONGEST_TEXT = 10**6  # characters of a question, an instruction, an answer
LONGEST_NAME = 4096  # characters of a name: of documents, chunks, models, users, options
MOST_NAMES = 256  # in a list of them
_MOST_VALUES = 10**5  # of JSON, names of fields included
_DEEPEST = 64  # brackets in brackets
_LONGEST_MESSAGE = 2000  # characters of an error: it repeats what was sent
# A whole text of JSON, or what follows a quotation mark that none ends.
_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKET = re.compile(r"[^\[\]{}]++")
_SHORT_BODY = 1 << 16  # bytes that are read as JSON in a moment

# Threads for what takes a moment: it does not wait behind embeddings and ingests, which the loop's own threads do.
_BRIEF = ThreadPoolExecutor(4, "kvtool-brief")
T = TypeVar("T")
# What an error means to a client: status, type, code. The first class that fits.
_MEANINGS: tuple[tuple[type[KvtoolError], int, str, str], ...] = (
    (BusyError, 429, "rate_limit_error", "busy"),
    (TooSlowError, 504, "timeout_error", "timeout"),
    (EndedError, 503, "server_error", "ending"),
    (LeftError, 499, "client_error", "left"),
    (NothingFoundError, 404, "invalid_request_error", "nothing_found"),
    (UsageError, 400, "invalid_request_error", "invalid_request"),
    (StoreNotFoundError, 503, "server_error", "no_store"),
    (StoreLockedError, 503, "server_error", "store_locked"),
    (NoSpaceError, 507, "server_error", "no_space"),
    (RemoteError, 502, "server_error", "shared_store"),
)


class Refusal(Exception):
    """The error response to a request."""

    def __init__(self, status: int, code: str, message: str, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint, self.param = status, code, message, hint, param


def refused(refusal: Refusal) -> JSONResponse:
    """The response of a refusal."""
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    facts = error_facts(refusal.message, refusal.hint, kind, refusal.code, refusal.param)
    return JSONResponse({"error": facts}, refusal.status, headers)


def error_facts(message: str, hint: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error as its JSON has it; what is to be done stands in the message, too, which is all that clients show."""
    message, hint = (scrubbed(shortened(text)) for text in (message, hint))
    param = param and shortened(param).encode("utf-8", "replace").decode()  # a name that the client gave
    text = f"{message} ({hint})" if hint else message
    return {"message": text, "type": kind, "code": code, "param": param, "hint": hint}


def shortened(text: str) -> str:
    """Return a text that may repeat what a client sent, at a length that can be shown."""
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"


def failed(error: KvtoolError) -> JSONResponse:
    """The response of an error."""
    retry = {BusyError: getattr(error, "retry_after", 1), StoreLockedError: 5, EndedError: 5}.get(type(error))
    headers = None if retry is None else {"Retry-After": str(retry)}
    return JSONResponse({"error": failure(error)}, status_of(error), headers)


def failure(error: KvtoolError) -> dict[str, Any]:
    """An error as its JSON has it."""
    _, kind, code = _meaning(error)
    return error_facts(error.message, error.hint, kind, code)


def status_of(error: KvtoolError) -> int:
    """The status of an error."""
    return _meaning(error)[0]


def _meaning(error: KvtoolError) -> tuple[int, str, str]:
    for kind, status, name, code in _MEANINGS:
        if isinstance(error, kind):
            return status, name, code
    return 500, "server_error", "failed"


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises
    ------
    Refusal : it brings something else.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "not_json", "the body has to be JSON", "send Content-Type: application/json")
    data = await request.body()
    return _parsed(data) if len(data) <= _SHORT_BODY else await briefly(lambda: _parsed(data))


async def briefly(work: Callable[[], T]) -> T:
    """Do in another thread what takes a moment."""
    return await asyncio.get_running_loop().run_in_executor(_BRIEF, work)


def _parsed(data: bytes) -> dict[str, Any]:
    """Read a JSON object. The interpreter is held for no longer than 16 MB of text and few values take to be read."""
    try:
        text = data.decode("utf-8")
        _check_shape(text)
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, parse_int=_whole, object_pairs_hook=_once
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a pair of surrogates is no letter
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "not_json", f"the body is no JSON: {error}", "send one JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise Refusal(400, "not_json", "the body is no JSON object", 'such as {"messages": […]}')
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
    """An object each of whose names stands once: of two values one would be left out without a word."""
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise ValueError(f"{name[:LONGEST_NAME]!r} stands there twice")
        value[name] = each
    return value


def _check_shape(text: str) -> None:
    """Refuse JSON that is nested too deep, or has too many values. Raises ValueError."""
    plain = _TEXT.sub('""', text)
    if plain.count(",") + plain.count("[") + plain.count("{") > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    depth = 0
    for letter in _NO_BRACKET.sub("", plain):
        depth += 1 if letter in "[{" else -1
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")


def taken(
    value: Mapping[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    default: Any = None,
    longest: int = LONGEST_NAME,
) -> Any:
    """Return a field of a request; null and a missing one are its default.

    Parameters
    ----------
    longest : characters that a text may have.

    Raises
    ------
    Refusal : it is of another type, or too long.
    """
    found = value.get(name)
    if found is None:
        return default
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        words = " or ".join(_KINDS[each] for each in kinds)
        raise Refusal(400, "wrong_type", f"{name} is not {words}", param=name)
    return within(found, name, longest)


def within(found: T, name: str, longest: int = LONGEST_NAME) -> T:
    """Return a text that is no longer than it may be; other values as they are. Raises Refusal."""
    if isinstance(found, str) and len(found) > longest:
        raise Refusal(400, "too_long", f"{name} has {len(found):,} characters", f"at most {longest:,}", name)
    return found


_KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def texts(value: Mapping[str, Any], name: str, longest: int = LONGEST_NAME, most: int = MOST_NAMES) -> tuple[str, ...]:
    """Return a field that is a text or a list of them.

    Parameters
    ----------
    longest : characters that each may have. `most`: how many there may be.

    Raises
    ------
    Refusal : it is something else, or too much.
    """
    found = taken(value, name, (str, list), (), longest)
    found = [found] if isinstance(found, str) else found
    if len(found) > most:
        raise Refusal(400, "too_many", f"{name} has {len(found):,} texts", f"at most {most:,}", name)
    if not all(isinstance(text, str) for text in found):
        raise Refusal(400, "wrong_type", f"{name} is no list of texts", param=name)
    return tuple(within(text, name, longest) for text in found)
