"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from kvtool.core.errors import KvtoolError
from kvtool.core.query.options import QueryOptions
from kvtool.serve.asking import Wanted, read_chat, read_completion
from kvtool.serve.engine import Engine
from kvtool.serve.facts import facts_of
from kvtool.serve.job import Answer, Ask, LeftError
from kvtool.serve.listening import listening, while_there
from kvtool.serve.telling import WAITING, Telling
from kvtool.serve.wire import Refusal, body_of, status_of

_BEFORE_HEADERS = 10.0  # seconds in which what fails has a status of its own
_ALIVE_EVERY = 10.0  # seconds between two signs of life
_ANY_NAME = "kvtool"  # what the model is always called, too
Read = Callable[[Mapping[str, Any], QueryOptions, bool], Wanted]


class Answers:
    """The endpoints that answer.

    Parameters
    ----------
    options : of questions, where the client says nothing.
    spot : reuse stored passages that messages hold.
    """

    def __init__(self, engine: Engine, options: QueryOptions, spot: bool) -> None:
        self._engine, self._options, self._spot = engine, options, spot

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answered(request, read_chat, chat=True)

    async def completion(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answered(request, read_completion, chat=False)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        names = [name for name in (self._engine.model_name, self._engine.embedder_name) if name]
        created = int(time.time())
        rows = [{"id": name, "object": "model", "created": created, "owned_by": "kvtool"} for name in names]
        return JSONResponse({"object": "list", "data": rows})

    async def _answered(self, request: Request, read: Read, chat: bool) -> Response:
        wanted = read(await body_of(request), self._options, self._spot)
        name = self._engine.model_name
        if wanted.model not in ("", _ANY_NAME, name):
            hint = f"this server has {name!r}" if name else "nothing is ingested yet"
            raise Refusal(404, "model_not_found", f"there is no model {wanted.model!r}", hint, "model")
        address = request.client.host if request.client else ""
        ask = replace(wanted.ask, client=(address, wanted.user))
        telling = Telling(chat, name or _ANY_NAME, wanted.usage)
        if wanted.stream:
            events = self._streamed(request, ask, telling)
            first = await while_there(request, anext(events))  # what fails before it has a status of its own
            return EventStream.of(first, events, "text/event-stream")
        async with listening(self._engine, ask) as heard:
            answer = await while_there(request, heard.whole())
        facts_of(request).answered(answer)
        return JSONResponse(telling.whole(answer))

    async def _streamed(self, request: Request, ask: Ask, telling: Telling) -> AsyncGenerator[str]:
        """The events of a streamed answer; the first comes when the answer has begun, or is long in coming."""
        async with listening(self._engine, ask) as heard:
            event = await heard.next(_BEFORE_HEADERS)
            left: KvtoolError | None = LeftError("the client has left")
            try:
                for text in telling.beginning():
                    yield text
                while not isinstance(event, Answer):
                    for text in [WAITING] if event is None else telling.piece(event):
                        yield text
                    event = await heard.next(_ALIVE_EVERY)
                facts_of(request).answered(event)
                left = None
                for text in telling.end(event):
                    yield text
            except KvtoolError as error:
                left = error
                for text in telling.broken(error):
                    yield text
            finally:
                if left is not None:
                    facts_of(request).failed(left, status_of(left))


async def _after(first: str, events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(events):
        yield first
        async for text in events:
            yield text


class EventStream(StreamingResponse):
    """A stream that is given up as soon as nobody reads it."""

    body_iterator: AsyncGenerator[str]

    @classmethod
    def of(cls, first: str, events: AsyncGenerator[str], media_type: str) -> EventStream:
        """Stream events, of which one is there already."""
        return cls(_after(first, events), media_type=media_type, headers={"Cache-Control": "no-store"})

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)
