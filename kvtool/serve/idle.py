"""Idle work: KV that questions missed, and what else has none, computed while no question waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.common.machine import cores
from kvtool.core.errors import GateError, KvtoolError, NoSpaceError, StoreLockedError
from kvtool.serve.options import IdleOptions

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkSpec
    from kvtool.core.session.due import DueChunk
    from kvtool.core.session.session import Session

_AT_ONCE = 512  # tokens of a step, unless a single chunk has more
_AGAIN_S, _LONGEST_S = 30.0, 3600.0  # after which battery, load, lock and space are looked at again
_POWER = Path("/sys/class/power_supply")


class Interrupted(Exception):
    """Ends a step between two layers: a question waits."""


class IdleWork:
    def __init__(self, options: IdleOptions) -> None:
        self._options = options
        self._due: list[DueChunk] = []  # the next one last
        self._revision = -1  # of the documents that `_due` was read from
        self._not_before = 0.0  # by `time.monotonic()`
        self._full_s = _AGAIN_S  # after which a full store is tried again, the longer the more often it was full

    def wait(self, missed: int | None) -> float | None:
        """Return the seconds until the next step; None: there is nothing to do until something changes. `missed`: how
        many chunks questions missed; None: no model is loaded."""
        if missed is None or self._options.idle == "none" or not (missed or self._options.idle == "all"):
            return None
        return max(0.0, self._not_before - time.monotonic())

    def step(self, opened: Callable[[], Session], pause: Callable[[], None]) -> None:
        """Compute and store some chunks. `pause` is called between two layers; its Interrupted ends the step."""
        from kvtool.core.query.fuse_prompt import store_missed

        self._not_before = time.monotonic() + _AGAIN_S  # unless this step succeeds
        if on_battery() or os.getloadavg()[0] > self._options.idle_load * cores():
            return
        session = opened()
        if not (chunks := self._next(session)):
            return
        try:
            with session.lock, session.decoder.pausing(pause):
                session.check_gate()  # which the next question would wait for
                store_missed(session, chunks, later=True)
        except Interrupted:
            self._not_before = 0.0
            return
        except StoreLockedError:  # an ingest computes them itself
            return
        except GateError:
            self._not_before = time.monotonic() + _LONGEST_S
            raise
        except NoSpaceError:
            self._full_s = min(2 * self._full_s, _LONGEST_S)
            self._not_before = time.monotonic() + self._full_s
            raise
        except KvtoolError:
            self._drop(session, chunks)
            raise
        self._not_before, self._full_s = 0.0, _AGAIN_S
        self._drop(session, chunks)

    def _next(self, session: Session) -> list[ChunkSpec]:
        from kvtool.core.session.due import due, specs_of

        missed: Iterable[ChunkSpec] = [*(session.missed or {}).values()]
        if not missed and self._options.idle == "all":
            if (revision := session.store.documents_revision()) != self._revision:
                self._due, self._revision = due(session.store, session.identity)[::-1], revision
            missed = specs_of(session.store, session.identity, reversed(self._due))
        chosen: list[ChunkSpec] = []
        tokens = 0
        for chunk in missed:
            tokens += len(chunk.ids)
            if chosen and tokens > _AT_ONCE:
                break
            chosen.append(chunk)
        return chosen

    def _drop(self, session: Session, chunks: list[ChunkSpec]) -> None:
        gone = {chunk.chunk_id for chunk in chunks}
        for chunk_id in gone:
            if session.missed is not None:
                session.missed.pop(chunk_id, None)
        self._due = [chunk for chunk in self._due if chunk.chunk_id not in gone]


def on_battery() -> bool:
    """Return True if a battery of this machine is being discharged; False where the system does not say."""
    with suppress(OSError):
        return any(path.read_text().strip() == "Discharging" for path in _POWER.glob("*/status"))
    return False
