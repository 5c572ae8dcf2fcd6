"""HTTP/1.1 that gives clients up which send a head by the byte, or do not read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """A connection that is broken off where no whole head of a request comes, or nothing is read, for so long.

    Bodies that do not come are the application's affair (`guard.Patience`), which can say so. Between two requests
    the library closes a connection sooner; here one whose last response is not read ends, too.
    """

    patience: float  # seconds, of `patient`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_head()  # before the one that may wait already is begun
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: more was written than the client takes."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        _cancel(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        _cancel(self._head_timer)
        _cancel(self._read_timer)

    def _await_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.patience, self._give_up, self.cycle)

    def _give_up(self, before: object) -> None:
        if self.cycle is before:  # no request has come since
            self.transport.abort()


def patient(seconds: float) -> type[PatientProtocol]:
    """The protocol with so much patience."""
    return type("Patient", (PatientProtocol,), {"patience": seconds})


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
