"""During a fetch, what has come is decoded, the last first, and what does not come is computed: never waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Candidate, Segment
from kvtool.core.fusion.source import ChunkCache, KVSource, ReadStats, RecordMissing
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.query.streaming import COMPUTED, BackgroundDecoder

LAYERS, RECORD = 3, 10  # bytes
SEGMENTS = [Segment((1, 2), 2 * number, "hit", Candidate((1, 2), bytes([number]))) for number in range(4)]


class Stepped(KVSource):
    """A source that decodes a layer for every `step`, and reports which."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.begun: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
        self.read_: list[tuple[int, str, int]] = []
        self.broken: dict[int, Exception] = {}

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        (segment,) = segments
        level = segment.source.level or ""
        if level == "damaged":
            raise RecordMissing(segment, "damaged")
        if level == "large":
            raise MemoryError
        self.begun.put((segment.source.chunk_id[0], level, layer))
        assert self._steps.acquire(timeout=10)
        self.read_.append((segment.source.chunk_id[0], level, layer))
        stats.bytes_read += RECORD
        return [(torch.ones(1, 2, 4), torch.ones(1, 2, 4))]

    def prefill(self, segment: Segment, going: Callable[[], bool]) -> ChunkKV | None:
        number = segment.source.chunk_id[0]
        if number in self.broken:
            raise self.broken[number]
        for layer in range(LAYERS):
            if not going():
                return None
            self.begun.put((number, "text", layer))
            assert self._steps.acquire(timeout=10)
        return ChunkKV(*(torch.full((LAYERS, 1, 2, 4), 7.0) for _ in range(2)))

    def step(self, count: int = 1) -> None:
        self._steps.release(count)


class Bench:
    def __init__(self) -> None:
        self.source = Stepped()
        self.held = ChunkCache(self.source, 2**20)
        self.ahead = BackgroundDecoder(self.held, LAYERS, self.source.prefill)

    def put(self, number: int, level: str = "4") -> None:
        self.ahead.put(number, SEGMENTS[number], level)

    def begun(self) -> tuple[int, str, int]:
        return self.source.begun.get(timeout=10)

    def through(self, number: int, level: str) -> None:
        for layer in range(LAYERS):
            assert self.begun() == (number, level, layer)
            self.source.step()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def wait_until_idle(bench: Bench) -> None:
    deadline = time.monotonic() + 10
    while bench.ahead.bytes_read(dict.fromkeys(range(4), "4")) % (LAYERS * RECORD) and time.monotonic() < deadline:
        time.sleep(0.001)


def finish_in_the_middle(bench: Bench) -> None:
    """End while a layer is under way, which then ends too."""
    ending = threading.Thread(target=bench.ahead.finish)
    ending.start()
    while not bench.ahead._stopped:
        time.sleep(0.001)
    bench.source.step()
    ending.join(10)
    assert not ending.is_alive()


def test_what_came_last_is_decoded_first(bench: Bench) -> None:
    bench.put(0)
    assert bench.begun() == (0, "4", 0)
    bench.put(1)
    bench.put(2)
    bench.source.step(3 * LAYERS)
    done = [bench.begun() for _ in range(3 * LAYERS - 1)]
    assert [number for number, _, layer in done if layer == 1] == [0, 2, 1]
    wait_until_idle(bench)
    bench.ahead.finish()
    assert bench.ahead.bytes_read({0: "4", 1: "4", 2: "4"}) == 3 * LAYERS * RECORD
    assert bench.ahead.bytes_read({0: "4", 1: None, 2: "3"}) == LAYERS * RECORD  # text, and refined by others


def test_a_chunk_that_is_refined_is_begun_anew(bench: Bench) -> None:
    bench.put(0)
    assert bench.begun() == (0, "4", 0)
    bench.put(0, "3")
    bench.source.step()
    bench.through(0, "3")
    bench.put(1, "4")  # begun only when the one before is whole
    assert bench.begun() == (1, "4", 0)
    size = bench.held.held_bytes
    assert size == LAYERS * 2 * 2 * 4 * 4  # of level 4 nothing is left
    bench.put(0, "2")
    bench.source.step(LAYERS)
    assert [bench.begun() for _ in range(LAYERS)][-1] == (0, "2", 0)
    assert bench.held.held_bytes == size  # level 3 was evicted for chunk 1
    bench.source.step()
    bench.ahead.finish()
    assert bench.ahead.bytes_read({0: "3", 1: "4"}) == LAYERS * RECORD


def test_nothing_is_waited_for_at_the_end(bench: Bench) -> None:
    bench.put(0)
    bench.put(1)
    first = bench.begun()[0]
    finish_in_the_middle(bench)
    assert bench.source.read_ == [(first, "4", 0)]
    assert bench.ahead.bytes_read({0: "4", 1: "4"}) == RECORD


@pytest.mark.parametrize("level", ["damaged", "large"])
def test_a_record_that_cannot_be_decoded_ends_its_chunk_only(level: str, bench: Bench) -> None:
    bench.put(0, level)
    bench.put(1)
    bench.through(1, "4")
    wait_until_idle(bench)
    bench.ahead.finish()
    assert bench.ahead.bytes_read({0: level, 1: "4"}) == LAYERS * RECORD


def test_what_is_known_of_its_speed(bench: Bench) -> None:
    assert bench.ahead.seconds(100, "4") == 0.0
    for number in (0, 1):
        bench.put(number)
        assert bench.begun() == (number, "4", 0)
        assert bench.ahead.seconds(100, "4") == 0.0
        bench.source.step(LAYERS)
        assert [bench.begun()[2] for _ in range(LAYERS - 1)] == [1, 2]
    bench.put(2)
    assert bench.begun()[0] == 2
    assert bench.ahead.seconds(100, "4") == bench.ahead.seconds(100, "1") > 0
    assert bench.ahead.seconds(200, "4") == pytest.approx(2 * bench.ahead.seconds(100, "4"))
    bench.source.step()
    bench.ahead.finish()


# ---- computing ---------------------------------------------------------------------------------------------------


def compute(bench: Bench, number: int) -> None:
    bench.ahead.compute(number, SEGMENTS[number])
    assert bench.begun() == (number, "text", 0)


def ended(bench: Bench) -> tuple[int, bool]:
    bench.ahead.wait(10)
    told = bench.ahead.ended()
    assert told is not None
    assert bench.ahead.ended() is None
    assert bench.ahead.computing is None
    return told.number, told.whole


def held(bench: Bench, number: int) -> bool:
    segment = SEGMENTS[number]
    return bench.held.holds(replace(segment, source=replace(segment.source, level=COMPUTED)), LAYERS)


def test_what_was_computed_stands_for_what_came(bench: Bench) -> None:
    bench.put(0)
    bench.through(0, "4")
    wait_until_idle(bench)
    size = bench.held.held_bytes
    compute(bench, 0)
    assert bench.ahead.computing == 0
    bench.source.step(LAYERS)
    assert ended(bench) == (0, True)
    assert held(bench, 0)
    assert bench.held.held_bytes == size
    bench.put(0, "3")  # which comes too late
    bench.put(1)
    for _ in range(LAYERS - 1):
        bench.begun()
    assert bench.begun() == (1, "4", 0)
    finish_in_the_middle(bench)
    assert bench.ahead.bytes_read({0: COMPUTED, 1: "4"}) == RECORD


def test_computing_gives_way_between_its_layers_to_what_has_come(bench: Bench) -> None:
    compute(bench, 0)
    bench.put(3)
    bench.source.step()
    bench.through(3, "4")
    assert bench.begun() == (0, "text", 1)
    bench.put(0)  # its own coarse level: to have something should it be stopped
    bench.source.step()
    bench.through(0, "4")
    assert bench.begun() == (0, "text", 2)
    bench.source.step()
    assert ended(bench) == (0, True)
    bench.ahead.finish()
    assert bench.ahead.bytes_read({0: COMPUTED, 3: "4"}) == LAYERS * RECORD


@pytest.mark.parametrize("finish", [False, True])
def test_what_is_stopped_ends_after_its_layer(finish: bool, bench: Bench) -> None:
    compute(bench, 0)
    if finish:
        finish_in_the_middle(bench)
    else:
        bench.ahead.stop()
        assert bench.ahead.ended() is None
        bench.source.step()
    assert ended(bench) == (0, False)
    assert not held(bench, 0)
    assert bench.source.begun.empty()
    bench.ahead.finish()


@pytest.mark.parametrize("error", [DamagedError("the lead-in is lost"), RuntimeError("no memory")])
def test_what_cannot_be_computed_alone_is_left_to_the_pass(error: Exception, bench: Bench) -> None:
    bench.source.broken = {0: error}
    bench.ahead.compute(0, SEGMENTS[0])
    assert ended(bench) == (0, False)
    compute(bench, 1)
    bench.source.step(LAYERS)
    assert ended(bench) == (1, True)
    bench.ahead.finish()


def test_what_memory_does_not_hold_is_not_counted_as_computed(bench: Bench) -> None:
    bench.held = ChunkCache(bench.source, 10)
    bench.ahead = BackgroundDecoder(bench.held, LAYERS, bench.source.prefill)
    compute(bench, 0)
    bench.source.step(LAYERS)
    assert ended(bench) == (0, False)
    bench.ahead.finish()
