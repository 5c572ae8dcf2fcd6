"""The driver of a policy over a link: what it begins, reports and stops, and in which order."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from kvtool.core.cache.backend import BlobRequest, BlobResponse, RemoteBackend
from kvtool.core.errors import RemoteError
from kvtool.core.fusion.plan import Candidate, Segment
from kvtool.core.query.streaming import BackgroundDecoder, Driver, Ended
from kvtool.core.streaming.fetch_state import Fetch, Part

SEGMENTS = [Segment((1, 2), 2 * number, "hit", Candidate((1, 2), bytes([number]))) for number in range(4)]


def fetch(chunk: int) -> Fetch:
    return Fetch(chunk, "4", (Part("4", 10),), None, None)


@dataclass
class Scripted:
    fetches: deque[Fetch] = field(default_factory=deque)
    texts: deque[int] = field(default_factory=deque)
    come: deque[bytes | None] = field(default_factory=deque)  # None: nothing yet
    ends: deque[Ended | None] = field(default_factory=deque)  # of what is computed, when it is looked at
    limits: dict[int, float] = field(default_factory=dict)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    computing: int | None = None
    timeout: float = 60.0
    url: str = "redis://far"
    alive: bool = True

    def run(self) -> list[tuple[Any, ...]]:
        Driver(
            cast("RemoteBackend", self),
            SEGMENTS,
            cast("Any", self),
            cast("BackgroundDecoder", self),
            time.perf_counter(),
        ).run()
        return self.told

    # ---- the policy ----

    def next(self, now: float) -> Fetch | None:
        return self.fetches.popleft() if self.fetches else None

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        self.told.append(("fetched" if arrived else "lost", fetch.chunk))

    def give_up_at(self, fetch: Fetch) -> float | None:
        return self.limits.get(fetch.chunk)

    def stop_at(self, chunk: int) -> float | None:
        return self.limits.get(chunk)

    # ---- the processor ----

    def compute(self, first: Any, segment: Segment | None = None) -> int | None:
        if segment is None:  # the policy is asked
            return self.texts.popleft() if self.texts else None
        self.computing = first
        self.told.append(("begun", first))
        return None

    def ended(self, *report: Any) -> Ended | None:
        if report:  # the policy gets the report
            self.told.append(("computed" if report[3] else "stopped", report[0]))
            return None
        ended = self.ends.popleft() if self.ends else None
        self.computing = self.computing if ended is None else None
        return ended

    def stop(self) -> None:
        if self.computing is not None:
            self.ends.append(Ended(self.computing, 0.1, False))

    def wait(self, seconds: float) -> None:
        self.told.append(("waited",))

    def finish(self) -> None:
        self.stop()

    def put(self, number: int, segment: Segment, level: str) -> None:
        self.told.append(("decoded", number))

    # ---- the link ----

    def wanted(self, chunk_id: bytes, level: str) -> list[BlobRequest]:
        return [BlobRequest(f"kv/{chunk_id.hex()}", 10)]

    def arrivals(self) -> Scripted:
        return self

    def ask(self, wanted: Any) -> None:
        self.told.append(("asked", int(wanted[0].name[3:], 16)))

    def take(self, timeout: float) -> BlobResponse:
        value = self.come.popleft() if self.come else None
        if value is None:
            raise RemoteError("nothing yet")
        return BlobResponse("kv", value, time.perf_counter())

    def keep(self, place: tuple[bytes, str], layer: int, value: bytes | None) -> bool:
        return True

    def close(self) -> None:
        return None

    def give_up(self, error: Exception) -> None:
        self.told.append((str(error),))


def test_one_chunk_is_computed_while_others_come() -> None:
    ends = deque([None, None, Ended(3, 0.1, True), None, Ended(2, 0.1, True)])
    script = Scripted(deque([fetch(0)]), deque([3, 2]), deque([None, None, b"v"]), ends)
    assert [one for one in script.run() if one != ("waited",)] == [
        *(("asked", 0), ("begun", 3), ("computed", 3), ("begun", 2)),
        *(("fetched", 0), ("decoded", 0), ("computed", 2)),
    ]


def test_what_is_worth_waiting_for_is_waited_for() -> None:
    script = Scripted(texts=deque([1]), ends=deque([None, None, Ended(1, 0.1, True)]))
    assert script.run() == [("begun", 1), ("waited",), ("waited",), ("computed", 1)]


def test_what_is_not_is_stopped_and_the_end_of_it_is_told() -> None:
    script = Scripted(texts=deque([1]), limits={1: 0.0})
    assert script.run() == [("begun", 1), ("waited",), ("waited",), ("stopped", 1)]


def test_a_link_that_sends_nothing_in_its_time_is_lost_and_what_is_computed_is_stopped() -> None:
    script = Scripted(deque([fetch(0), fetch(1)]), deque([3]), timeout=0.0)
    *_, lost, first, second, stopped = script.run()
    assert lost == ("redis://far sent nothing whole within 0 s",)
    assert [first, second, stopped] == [("lost", 0), ("lost", 1), ("stopped", 3)]
