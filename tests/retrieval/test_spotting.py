"""Chunks are found in a prompt by their token ids, wherever they are pasted, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.retrieval import spotting
from kvtool.core.retrieval.spotting import FEWEST, SEAM, Span, Spotter

Ids = list[int]


def words(count: int, seed: int, vocabulary: int = 50_000) -> Ids:
    return random.Random(seed).choices(range(vocabulary), k=count)


def id_of(number: int) -> bytes:
    return number.to_bytes(ID_BYTES, "big")


def spotter_of(chunks: Sequence[Ids]) -> Spotter:
    spotter = Spotter(lambda chunk_id: chunks[int.from_bytes(chunk_id, "big")])
    spotter.update(map(id_of, range(len(chunks))))
    return spotter


def assert_true(spans: Sequence[Span], chunks: Sequence[Ids], prompt: Ids) -> None:
    for span in spans:
        own = chunks[int.from_bytes(span.chunk_id, "big")]
        assert own[span.skipped : span.skipped + len(span)] == prompt[span.start : span.stop]
        assert len(span) >= FEWEST
    for one, other in pairwise(spans):
        assert one.stop <= other.start


CHUNKS = [words(length, seed) for seed, length in enumerate((180, 24, 60, 31, 400))]


def test_whole_chunks_in_any_order_and_between_other_text() -> None:
    order = [3, 0, 4, 2, 1]
    prompt, expected = words(50, 90), []
    for number in order:
        expected.append(Span(id_of(number), len(prompt), len(prompt) + len(CHUNKS[number]), 0))
        prompt += CHUNKS[number] + words(9, 100 + number)
    assert spotter_of(CHUNKS).spot(prompt) == expected
    assert spotter_of(CHUNKS).spot(words(500, 91)) == []
    assert spotter_of(CHUNKS).spot([]) == spotter_of([]).spot(prompt) == []


@pytest.mark.parametrize("number", [0, 2, 4])
def test_tokens_at_the_seams_may_differ(number: int) -> None:
    chunk = CHUNKS[number]
    prompt = [*words(30, 92), *chunk[SEAM:-SEAM], *words(30, 93)]
    (span,) = spotter_of(CHUNKS).spot(prompt)
    assert span == Span(id_of(number), 30, 30 + len(chunk) - 2 * SEAM, SEAM)


def test_cut_repeated_and_overlapping_chunks() -> None:
    chunk = CHUNKS[4]
    cut = chunk[:90] + words(3, 94) + chunk[150:330]
    assert spotter_of(CHUNKS).spot(cut) == [Span(id_of(4), 0, 90, 0), Span(id_of(4), 93, 273, 150)]
    long = words(100, 95)
    chunks = [long[:40], long, long[70:] + words(60, 96)]
    prompt = [*long, *chunks[2][30:], *words(5, 97)]
    assert spotter_of(chunks).spot(prompt) == [Span(id_of(1), 0, 100, 0), Span(id_of(2), 100, 160, 30)]
    prompt = CHUNKS[0] * 3
    assert [(span.start, span.skipped) for span in spotter_of(CHUNKS).spot(prompt)] == [(0, 0), (180, 0), (360, 0)]


def test_hashes_that_agree_by_accident_claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spotting, "_hashes", lambda columns: np.zeros(columns.shape[1], np.uint64))
    assert spotter_of(CHUNKS).spot(words(300, 98)) == []
    assert [span.chunk_id for span in spotter_of(CHUNKS).spot(CHUNKS[0])] == [id_of(0)]


def test_an_update_adds_what_is_new_and_drops_what_is_gone() -> None:
    read: list[bytes] = []
    chunks = {id_of(number): chunk for number, chunk in enumerate(CHUNKS)}

    def reading(chunk_id: bytes) -> Sequence[int]:
        read.append(chunk_id)
        return chunks[chunk_id]

    spotter = Spotter(reading)
    spotter.update([id_of(0), id_of(2)])
    assert read == [id_of(0), id_of(2)]
    spotter.update([id_of(4), id_of(2)])
    assert read[2:] == [id_of(4)]
    prompt = CHUNKS[0] + CHUNKS[2] + CHUNKS[4]
    assert [span.chunk_id for span in spotter.spot(prompt)] == [id_of(2), id_of(4)]
    spotter.update([])
    assert spotter.spot(prompt) == []
    spotter.update([id_of(0)])
    del chunks[id_of(0)]
    chunks[id_of(0)] = []  # deleted since
    assert spotter.spot(prompt) == []


def test_memory() -> None:
    chunks = [words(180, seed) for seed in range(2000)]
    assert spotter_of(chunks).nbytes <= 60 * len(chunks)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_texts_of_few_words(seed: int, vocabulary: int) -> None:
    chosen = random.Random(seed)
    chunks = [words(chosen.randrange(20, 90), seed + number, vocabulary) for number in range(6)]
    prompt = list[int]()
    for _ in range(8):
        chunk = chosen.choice(chunks)
        prompt += chunk[chosen.randrange(10) :][: chosen.randrange(20, 90)] + words(
            chosen.randrange(4), seed + 9, vocabulary
        )
    assert_true(spotter_of(chunks).spot(prompt), chunks, prompt)
    assert spotter_of([chunks[0]]).spot(chunks[0]) or len(chunks[0]) < FEWEST


def test_a_text_that_repeats_itself_is_found_all_along() -> None:
    """Each place of it begins a match: overlaps are resolved in order, not pair by pair."""
    prompt = [7] * 5000
    for length in (FEWEST, 40, 256):
        spans = spotter_of([[7] * length]).spot(prompt)
        assert_true(spans, [[7] * length], prompt)
        assert len(prompt) - sum(map(len, spans)) < FEWEST + 2 * SEAM


@pytest.mark.parametrize("period", [1, 2, 30])
def test_compared_tokens_grow_linearly(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, common = [0], spotting._common

    def counting(one: spotting.Tokens, other: spotting.Tokens) -> int:
        same = common(one, other)
        compared[0] += same + 1
        return same

    monkeypatch.setattr(spotting, "_common", counting)
    text = list(range(period)) * (3000 // period)
    spotter = Spotter(lambda chunk_id: text, anchors=1 << 12)
    spotter.update([id_of(0)])
    spans = spotter.spot(text)
    assert_true(spans, [text], text)
    assert sum(map(len, spans)) > len(text) - FEWEST - 2 * SEAM
    assert compared[0] <= 80 * len(text)


def test_a_chunk_that_could_not_be_read_is_read_again() -> None:
    readable: dict[bytes, Ids] = {id_of(0): CHUNKS[0]}
    spotter = Spotter(lambda chunk_id: readable.get(chunk_id, []))
    spotter.update([id_of(0), id_of(2)])
    assert spotter.unread == 1
    assert spotter.spot([*CHUNKS[2], *CHUNKS[0]]) == [Span(id_of(0), 60, 240, 0)]
    readable[id_of(2)] = CHUNKS[2]
    spotter.update([id_of(0), id_of(2)])
    assert spotter.unread == 0
    assert spotter.spot([*CHUNKS[2], *CHUNKS[0]]) == [Span(id_of(2), 0, 60, 0), Span(id_of(0), 60, 240, 0)]


def test_more_anchors_find_a_short_part_of_a_long_text() -> None:
    text = words(4000, 95)
    part = [*words(40, 96), *text[1500:1560], *words(40, 97)]
    dense = Spotter(lambda chunk_id: text, anchors=200)
    dense.update([id_of(0)])
    assert dense.spot(part) == [Span(id_of(0), 40, 100, 1500)]
    assert spotter_of([text]).spot(part) == []
