"""Answers to HTTP requests, in whatever API a client asks: one request, one answer, one stream.

A dialect is a file that reads its requests into `Chat` and writes an `Answer` as a `Response`; see `Dialect`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from kvtool.core.errors import KvtoolError
from kvtool.core.query.options import QueryOptions
from kvtool.core.session.learned import EVERYBODY
from kvtool.serve.auth import OWNER
from kvtool.serve.chat import Chat, Hold, with_calls
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event, LeftError, TokenCounts
from kvtool.serve.metrics import RequestStats, stats_of
from kvtool.serve.options import ServeOptions
from kvtool.serve.wire import Refusal, body_of, briefly

T = TypeVar("T")
_FORCING = ("response_format", "text", "output_config", "format", "tool_choice")  # compiled, which may take seconds
ANY_NAME = "kvtool"  # a further name of the model


Read = Callable[[Mapping[str, Any]], Chat]
"""Reads a body. Raises Refusal."""


class Dialect(Protocol):
    """An API's way to write one answer: an object, or a stream, by default of server-sent events."""

    media_type: ClassVar[str] = "text/event-stream"
    is_raw: ClassVar[bool] = False  # it begins at once, and keeps white space at the ends of the text

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the object of a complete answer."""

    def beginning(self, prompt: TokenCounts) -> Iterator[str]:
        yield from ()

    def piece(self, text: str) -> Iterator[str]:
        """Yield the events of a piece of text."""

    def waiting(self) -> str:
        """Return an event that keeps the connection open, and changes nothing."""
        return ": waiting\n\n"  # a comment

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the events after the last piece."""

    def failed(self, error: KvtoolError) -> Iterator[str]:
        """Yield the events of an error within a stream."""


Begin = Callable[[Chat, Ask, str], Dialect]
"""Makes the response to a request; its last argument is the model's name."""


def server_event(value: Mapping[str, Any], kind: str = "") -> str:
    """Write a server-sent event, in some APIs with its kind."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


class Trim:
    """White space at the ends of a text that comes in pieces; of one that is begun, at its end."""

    def __init__(self, is_begun: bool = False) -> None:
        self._held, self._begun = "", is_begun

    def piece(self, text: str) -> str:
        text = self._held + text
        text = text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def about(answer: Answer) -> dict[str, Any]:
    facts = {name: value for name, value in answer.facts.items() if name not in ("question", "answer")}
    if facts.get("verified", {}).get("corrected"):  # a stream has told only the draft
        facts["verified"] = facts["verified"] | {"answer": answer.text}
    facts["sources"] = list(answer.places)
    waits = {"queue": round(answer.queue_ms, 3), "others": round(answer.others_ms, 3)}
    facts["timing_ms"] = facts["timing_ms"] | waits
    facts["warnings"] = [{"message": text, "hint": hint} for text, hint in answer.warnings]
    return facts


class Answers:
    def __init__(self, engine: Engine, options: QueryOptions, serving: ServeOptions) -> None:
        self.engine, self._options, self._serving = engine, replace(options, clamp=True), serving
        self.any_model = serving.any_model

    def owner(self, request: Request) -> str:
        return str(request.scope.get(OWNER, EVERYBODY)) if self._serving.isolate else EVERYBODY

    def check_model(self, asked: str, name: str) -> None:
        if asked not in ("", ANY_NAME, name) and not self.any_model:
            raise unknown_model(asked, name)

    def route(self, path: str, read: Read, begin: Begin) -> Route:
        return Route(path, partial(self.answered, read=read, begin=begin), methods=["POST"])

    async def count(self, value: Mapping[str, Any], read: Read) -> int:
        _, ask = await self.parsed(value, read)
        return await asyncio.to_thread(self.engine.count, ask)

    async def parsed(self, value: Mapping[str, Any], read: Read) -> tuple[Chat, Ask]:
        def work() -> tuple[Chat, Ask]:
            chat = read(value)
            return chat, chat.ask(self._options, self._serving.strict)

        compiles = any(value.get(name) for name in _FORCING)
        chat, ask = await (asyncio.to_thread(work) if compiles else briefly(work))
        self.check_model(chat.model, self.engine.model_name)
        return chat, ask

    async def answered(
        self, request: Request, read: Read, begin: Begin, value: Mapping[str, Any] | None = None
    ) -> Response:
        """Answer a request. `value`: its body, if it is parsed already."""
        value = await body_of(request) if value is None else value
        chat, ask = await self.parsed(value, read)
        address = request.client.host if request.client else ""
        question = ask.request if self._serving.spot else replace(ask.request, messages=())
        ask = replace(ask, client=(address, chat.user), request=replace(question, owner=self.owner(request)))
        response = begin(chat, ask, self.engine.model_name or ANY_NAME)
        if chat.stream:
            events = stream(self.engine, ask, response, stats_of(request))
            first = await while_there(request, anext(events))  # an error before it has a status of its own
            return EventStream(first, events, response.media_type)
        with closing(Listening(self.engine, ask)) as heard:
            answer = await while_there(request, heard.whole())
        answer = with_calls(answer, ask.tools, ask.parallel, bool(ask.options.grammar)) if ask.tools else answer
        stats_of(request).answer = answer
        return JSONResponse(response.whole(answer))


async def stream(engine: Engine, ask: Ask, response: Dialect, stats: RequestStats) -> AsyncGenerator[str]:
    """Yield the events of a streamed answer; the first one after its first token, or after some seconds."""
    with closing(Listening(engine, ask)) as heard:
        event = await heard.next(0 if response.is_raw else _BEFORE_HEADERS)
        hold, trim = Hold(ask.tools), None if response.is_raw else Trim(bool(ask.request.prefill))
        left: KvtoolError | None = LeftError("the client has left")
        try:
            while event is None:
                yield response.waiting()
                event = await heard.next(ALIVE_EVERY)
            for text in response.beginning(heard.job.tokens):
                yield text
            while not isinstance(event, Answer):
                for text in [response.waiting()] if event is None else _shown(response, trim, hold.piece(event)):
                    yield text
                event = await heard.next(ALIVE_EVERY)
            answer = with_calls(event, ask.tools, ask.parallel, bool(ask.options.grammar)) if ask.tools else event
            stats.answer, left = answer, None
            for text in _shown(response, trim, hold.rest()) if answer is event else ():  # else it was a call
                yield text
            for text in response.end(answer):
                yield text
        except KvtoolError as error:
            left = error
            for text in response.failed(error):
                yield text
        finally:
            if left is not None:
                stats.failed(left, Refusal.of(left).status)


def _shown(response: Dialect, trim: Trim | None, text: str) -> Iterator[str]:
    if shown := text if trim is None else trim.piece(text):
        yield from response.piece(shown)


def unknown_model(name: str, known: str) -> Refusal:
    hint = "nothing is ingested yet"
    if known:
        hint = f"this server serves {known!r}; `kvtool serve --any-model` answers to every name"
    return Refusal(404, "model_not_found", f"model not found: {name!r}", hint, "model")


# ---- streams ----

_BEFORE_HEADERS = 10.0  # seconds in which an error has a status of its own
ALIVE_EVERY = 10.0  # seconds between two signs of life in a stream


class EventStream(StreamingResponse):
    """A streamed response that closes its events as soon as the client leaves. `first`: an event that is ready."""

    body_iterator: AsyncGenerator[str]

    def __init__(self, first: str, events: AsyncGenerator[str], media_type: str) -> None:
        super().__init__(_after(first, events), media_type=media_type, headers={"Cache-Control": "no-store"})

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


async def _after(first: str, events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(events):
        yield first
        async for text in events:
            yield text


# ---- waiting for an answer ----


class Listening:
    """A question that was asked, with the queue of its events from the engine's thread. Raises BusyError."""

    def __init__(self, engine: Engine, ask: Ask) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.job = engine.submit(ask, self.tell)

    def close(self) -> None:
        self._engine.scheduler.leave(self.job)

    def tell(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self, timeout: float | None = None) -> str | Answer | None:
        """Return the next event; None if none came for so many seconds. Raises the error that ended the answer."""
        try:
            event = await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return None
        if isinstance(event, KvtoolError):
            raise event
        return event

    async def whole(self) -> Answer:
        while not isinstance(event := await self.next(), Answer):
            pass
        return event


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Wait for work until the client leaves: then it is cancelled, and ClientDisconnect raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError, KvtoolError):
            await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
