"""Event stream of a question, awaited by a client that may leave at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from kvtool.core.errors import KvtoolError
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event, Job, LeftError

_LOOKED_AFTER = 10.0  # seconds between two looks whether an answer is still worked on
T = TypeVar("T")


class Listening:
    """The events of one question, brought from the thread that answers to the loop of the one who waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.job: Job | None = None  # once it was taken in

    def tell(self, event: Event) -> None:
        """Take an event, in any thread. Raises LeftError where the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            raise LeftError("nobody listens any more") from None

    async def next(self, patience: float | None = None) -> str | Answer | None:
        """The next event; None: there was none for so many seconds. Raises what ended the answer."""
        is_over = self.job is not None and self.job.ended  # what it was told last stands in the queue by now
        try:
            event = await asyncio.wait_for(self._events.get(), patience)
        except TimeoutError:
            if is_over:
                raise KvtoolError("the answer has no end", "this is a bug in kvtool") from None
            return None
        if isinstance(event, KvtoolError):
            raise event
        return event

    async def whole(self) -> Answer:
        """The whole answer, once it is there."""
        while not isinstance(event := await self.next(_LOOKED_AFTER), Answer):
            pass
        return event


@asynccontextmanager
async def listening(engine: Engine, ask: Ask) -> AsyncIterator[Listening]:
    """Ask, and listen as long as the block runs; an answer that is not there by then is given up. Raises BusyError."""
    events = Listening()
    job = events.job = engine.submit(ask, events.tell)
    try:
        yield events
    finally:
        engine.scheduler.leave(job)


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Wait for something as long as the client does.

    Raises
    ------
    ClientDisconnect : it has left; the work was cancelled.
    """
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
