"""Chunks held in memory between questions: read once, bounded, the same bits."""

from __future__ import annotations

import pytest

from kvtool.core.fusion.chunk_cache import ChunkCache, RecentChunks
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from tests.fusion.making import BOS, CHUNKS, PREFIX, Case, SpySource, same_bits, tokens

LAYERS = 4


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
