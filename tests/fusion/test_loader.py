"""The loader thread: order of reads, records that turn out missing while layers run, other trouble. Chunks held in
memory between questions: read once, bounded, the same bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from kvtool.core.errors import DamagedError
from kvtool.core.fusion import loader
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import ChunkCache, MemorySource, ReadStats, RecentChunks
from tests.fusion.making import (
    BOS,
    CHUNKS,
    LOSSLESS,
    NAMES,
    PREFIX,
    QUESTION,
    Case,
    SpySource,
    assert_full,
    case,
    join_loaders,
    missing_at,
    needed,
    same_bits,
    tokens,
)

LAYERS = 4


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvtool-loader"]


@pytest.mark.parametrize("name", SELECTORS)
def test_layers_are_read_in_order_once(llama: Case, plan: Plan, name: str) -> None:
    source = SpySource(llama.source)
    fused = llama.fuse(plan, SELECTORS[name](), source)
    wanted = tuple(segment.start for segment in needed(fused, SELECTORS[name]()))
    assert source.reads == ([(layer, wanted) for layer in range(LAYERS)] if wanted else [])
    assert not loader_threads()


def test_the_most_relevant_records_are_asked_for_first(llama: Case) -> None:
    source, plan = SpySource(llama.source), llama.plan(lead_in=BOS)
    asked = dict(zip(range(1, len(plan.segments) - 1), (1.0, 3.0, 2.0), strict=False))
    ranked = [
        replace(one, source=replace(one.source, relevance=asked.get(number, float("inf"))))
        for number, one in enumerate(plan.segments)
    ]
    fused = llama.fuse(Plan(tuple(ranked)), Reuse(), source)
    starts = [ranked[number].start for number in (2, 3, 1) if ranked[number].cached]
    assert [[start for start in read if start in starts] for _, read in source.reads] == [starts] * LAYERS
    assert same_bits(fused, llama.fuse(plan, Reuse(), llama.source))


def test_the_next_layer_is_read_while_one_computes(llama: Case) -> None:
    """The last layer has been read before the second one computes: nothing waits for compute."""
    read = threading.Event()

    def note(segments: Sequence[Segment], layer: int) -> None:
        if layer == LAYERS - 1:
            read.set()

    pauses = count()

    def wait() -> None:
        if next(pauses) == 1 and not read.wait(10):
            pytest.fail("read too late")

    with llama.decoder.pausing(wait):
        llama.fuse(llama.plan(lead_in=BOS), Reuse(), SpySource(llama.source, before=note))


@pytest.mark.some(24)
@pytest.mark.parametrize("layer", [0, 1, 2, LAYERS - 1])
@pytest.mark.parametrize("chunk", [0, 1, 2, 4])
@pytest.mark.parametrize("name", [name for name in SELECTORS if SELECTORS[name].uses_cache])
def test_a_record_that_turns_out_missing_becomes_a_hole(
    llama: Case, plan: Plan, name: str, chunk: int, layer: int
) -> None:
    source = SpySource(llama.source, before=missing_at(layer, chunk))
    if name == "prefix" and chunk > 0:
        assert "miss" not in {s.status for s in llama.fuse(plan, Prefix(), source).plan.segments}  # never read
        return
    fused = llama.fuse(plan, SELECTORS[name](), source)
    expected = llama.fuse(plan.without(plan.segments[chunk], "x"), SELECTORS[name]())
    assert same_bits(fused, expected)
    assert [s.status for s in fused.plan.segments] == [s.status for s in expected.plan.segments]
    hole = fused.plan.segments[chunk]
    assert (hole.status, hole.reason) == ("miss", f"damaged at layer {layer}")
    assert fused.tokens == expected.tokens
    assert fused.tokens.fresh == len(QUESTION) + len(hole.ids)
    assert not loader_threads()


class SlowSource(MemorySource):
    release: ClassVar[threading.Event]
    layer: ClassVar[int] = 1
    chunk: ClassVar[int] = 2
    reading: ClassVar[bool] = True  # or else it has been read, and is being decoded

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[Any]:
        for segment in segments:
            if layer == self.layer and segment.ids == CHUNKS[self.chunk - 1]:
                stats.reading = (segment, time.perf_counter()) if self.reading else None
                assert self.release.wait(30)
                stats.reading = None
        return super().read(segments, layer, stats)


@pytest.fixture
def slow(llama: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowSource]:
    monkeypatch.setattr(SlowSource, "release", threading.Event(), raising=False)
    yield SlowSource(llama.kept)
    SlowSource.release.set()
    join_loaders()


@pytest.mark.parametrize("name", [name for name in SELECTORS if SELECTORS[name].uses_cache and name != "prefix"])
def test_a_record_that_is_slow_becomes_a_hole(llama: Case, plan: Plan, name: str, slow: SlowSource) -> None:
    fused = llama.fuse(plan, SELECTORS[name](), slow, patience=0.05)
    assert same_bits(fused, llama.fuse(plan.without(plan.segments[2], "x"), SELECTORS[name]()))
    hole = fused.plan.segments[2]
    assert (hole.status, hole.reason) == ("miss", "slow: not read within 0.05 s")
    assert hole.source.stored  # nothing to make good
    assert fused.tokens.fresh == len(QUESTION) + len(hole.ids)


def test_what_a_slow_read_brings_at_last_is_given_up(llama: Case, slow: SlowSource) -> None:
    fused = llama.fuse(llama.plan(lead_in=BOS), Reuse(), slow, patience=0.05)
    before = [buffer.keys.clone() for buffer in fused.cache.buffers]
    slow.release.set()
    join_loaders()
    assert not loader_threads()
    for buffer, keys in zip(fused.cache.buffers, before, strict=True):
        assert torch.equal(buffer.keys, keys)


def test_decoding_may_take_its_time(llama: Case, plan: Plan, slow: SlowSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowSource, "reading", False)
    threading.Timer(0.3, slow.release.set).start()
    assert same_bits(llama.fuse(plan, Reuse(), slow, patience=0.05), llama.fuse(plan, Reuse()))


def test_every_record_missing_is_full_prefill(llama: Case) -> None:
    checks = [missing_at(layer, chunk) for chunk, layer in enumerate([2, 0, 1, 3, 0])]
    source = SpySource(llama.source, before=lambda segments, at: [check(segments, at) for check in checks] and None)
    fused = llama.fuse(llama.plan(lead_in=BOS), Blend(), source)
    assert {segment.status for segment in fused.plan.segments[:-1]} == {"miss"}
    assert fused.tokens.fresh == fused.tokens.prompt
    assert_full(llama, fused.plan.ids, fused.logits)


def test_the_same_chunk_twice(llama: Case) -> None:
    chunks = [CHUNKS[0], CHUNKS[1], CHUNKS[0]]
    plan = llama.plan(chunks, lead_in=BOS)
    fused = llama.fuse(plan, Reuse(), SpySource(llama.source, before=missing_at(1, 1)))
    assert [segment.status for segment in fused.plan.segments] == ["exact", "miss", "hit", "miss", "fresh"]
    assert same_bits(fused, llama.fuse(llama.plan(chunks, lead_in=BOS, holes=(0, 2)), Reuse()))


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.parametrize("error", [DamagedError("torn"), OSError(5, "input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["reuse", "blend"])
def test_other_trouble_is_raised_and_the_thread_ends(llama: Case, name: str, error: BaseException, layer: int) -> None:
    def fail(segments: Sequence[Segment], at: int) -> None:
        if at == layer:
            raise error

    with pytest.raises(type(error)) as caught:
        llama.fuse(llama.plan(lead_in=BOS), SELECTORS[name](), SpySource(llama.source, before=fail))
    assert caught.value is error
    assert not loader_threads()


def test_trouble_in_the_model_ends_the_thread() -> None:
    own, fail = case("llama"), mock.Mock(side_effect=[None, ArithmeticError])
    with pytest.raises(ArithmeticError), own.decoder.pausing(fail):
        own.fuse(own.plan(lead_in=BOS), Blend())
    assert not loader_threads()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_holes_are_computed_in_place(name: str, dtype: str) -> None:
    """All rows of holes and question are fresh; with everything else recomputed that is full prefill."""
    shared = case(name, dtype)
    plan = shared.plan(lead_in=BOS, holes=(0, 2))
    for selector in LOSSLESS.values():
        assert_full(shared, plan.ids, shared.fuse(plan, selector).logits)


def test_an_exact_chunk_behind_a_hole(llama: Case) -> None:
    plan = llama.plan([CHUNKS[1]], lead_in=PREFIX)
    plan = plan.without(plan.segments[0], "not stored")
    assert [segment.status for segment in plan.segments] == ["miss", "exact", "fresh"]
    for name in SELECTORS:
        fused = llama.fuse(plan, SELECTORS[name]())
        assert_full(llama, plan.ids, fused.logits)
        assert fused.tokens.fresh == len(PREFIX) + len(QUESTION)


def test_nothing_cached_at_all(llama: Case) -> None:
    plan = llama.plan([], lead_in=BOS)
    plan = plan.without(plan.segments[0], "not stored")
    for selector in (Reuse(), Epic(), Blend(), Full(), Prefix()):
        assert_full(llama, plan.ids, llama.fuse(plan, selector).logits)


def test_a_hole_at_the_end_and_a_long_question(llama: Case) -> None:
    plan = llama.plan(lead_in=BOS, holes=(3,), question=tokens(130, 83))
    fused = llama.fuse(plan, Epic(10_000))
    assert_full(llama, plan.ids, fused.logits)


@pytest.mark.parametrize("name", SELECTORS)
def test_several_threads_load_the_same(llama: Case, plan: Plan, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = llama.fuse(plan, SELECTORS[name]())
    monkeypatch.setattr(loader, "default_workers", lambda: 3)
    source = SpySource(llama.source)
    several = llama.fuse(plan, SELECTORS[name](), source)
    assert same_bits(one, several)
    assert several.bytes_read == one.bytes_read
    assert sorted(layer for layer, _ in source.reads) == (list(range(LAYERS)) if needed(one, SELECTORS[name]()) else [])
    assert not loader_threads()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_hole_met_by_one_of_several_threads(
    llama: Case, plan: Plan, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    monkeypatch.setattr(loader, "default_workers", lambda: 3)
    fused = llama.fuse(plan, Epic(), SpySource(llama.source, missing_at(layer, 2)))
    assert same_bits(fused, llama.fuse(llama.plan(lead_in=BOS, holes=(1,)), Epic()))
    assert fused.plan.chunks[1].reason == f"damaged at layer {layer}"


def test_a_chunk_is_read_once(llama: Case) -> None:
    spy = SpySource(llama.source)
    hot = ChunkCache(spy, 2**30)
    plan, other = llama.plan(lead_in=BOS), llama.plan(CHUNKS[:2], lead_in=BOS, question=tokens(9, 70))
    cold = llama.fuse(plan, Reuse())
    assert same_bits(llama.fuse(plan, Reuse(), hot), cold)
    assert len(spy.reads) == LAYERS
    assert same_bits(llama.fuse(plan, Reuse(), hot), cold)
    assert same_bits(llama.fuse(other, Epic(), hot), llama.fuse(other, Epic()))
    assert len(spy.reads) == LAYERS
    assert hot.held_bytes == llama.decoder.kv_bytes(len(PREFIX) + sum(map(len, CHUNKS)))


def test_only_what_is_missing_is_read(llama: Case, plan: Plan) -> None:
    spy = SpySource(llama.source)
    hot = ChunkCache(spy, 2**30)
    llama.fuse(llama.plan(CHUNKS[:1], lead_in=BOS), Reuse(), hot)
    spy.reads.clear()
    assert same_bits(llama.fuse(plan, Reuse(), hot), llama.fuse(plan, Reuse()))
    new = tuple(segment.start for segment in plan.chunks[1:])
    assert spy.reads == [(layer, new) for layer in range(LAYERS)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_memory_is_bounded_and_answers_stay(llama: Case, plan: Plan, share: float) -> None:
    limit = int(share * llama.decoder.kv_bytes(plan.length))
    hot = ChunkCache(llama.source, limit)
    for _ in range(3):
        assert same_bits(llama.fuse(plan, Reuse(), hot), llama.fuse(plan, Reuse()))
        assert hot.held_bytes <= limit


def test_the_chunk_used_last_stays(llama: Case) -> None:
    spy = SpySource(llama.source)
    one, two, three = CHUNKS[0], CHUNKS[1], CHUNKS[3]
    hot = ChunkCache(spy, llama.decoder.kv_bytes(len(PREFIX) + len(one) + max(len(two), len(three))))
    for chunk in (two, one, three):  # the third pushes the first out
        llama.fuse(llama.plan([chunk], lead_in=BOS), Reuse(), hot)
    spy.reads.clear()
    llama.fuse(llama.plan([one], lead_in=BOS), Reuse(), hot)
    assert spy.reads == []
    llama.fuse(llama.plan([two], lead_in=BOS), Reuse(), hot)
    assert len(spy.reads) == LAYERS


def test_warm_are_the_chunks_used_last_that_fit() -> None:
    warm = RecentChunks(100)
    for name, size in ((b"a", 40), (b"b", 40), (b"a", 40), (b"c", 50)):
        warm.use(name, size)
    assert [name in warm for name in (b"a", b"b", b"c", b"d")] == [True, False, True, False]
    warm.use(b"d", 101)
    assert not any(name in warm for name in (b"a", b"b", b"c", b"d"))


def test_what_is_forgotten_is_read_again(llama: Case, plan: Plan) -> None:
    spy = SpySource(llama.source)
    hot = ChunkCache(spy, 2**30)
    llama.fuse(plan, Reuse(), hot)
    spy.reads.clear()
    before, gone = hot.held_bytes, plan.chunks[1]
    hot.forget(gone)
    assert hot.held_bytes == before - llama.decoder.kv_bytes(len(gone.ids))
    assert not hot.holds(gone, LAYERS)
    hot.forget(gone)
    assert same_bits(llama.fuse(plan, Reuse(), hot), llama.fuse(plan, Reuse()))
    assert spy.reads == [(layer, (gone.start,)) for layer in range(LAYERS)]
