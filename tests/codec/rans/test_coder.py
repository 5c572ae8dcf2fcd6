"""Every back-end gives the reference's bytes and numbers, in the place and the form that were asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtool.core.codec.rans.coder import Decoding, decode, symbols_of
from kvtool.core.codec.rans.tables import U8, Columns, Stream, in_order
from kvtool.core.errors import DamagedError
from kvtool.core.native import jit
from kvtool.core.native.jit import address, compile_once
from tests.codec.rans import reference
from tests.codec.rans.streams import (
    TABLES,
    TERNARY,
    encoded,
    int16_job,
    sample,
    stream_of,
    symbols_for,
    table_set,
)
from tests.wording import refused

# Of `golden_sample`, by format version 1.
GOLDEN_WORDS = "80006007480630051804f802e001c800b00790067805"
GOLDEN_STATES = (
    "004004010000010000000100600001000303010000080800e02603010000010000000100600001000303010000080800c80d020100000100"
    "00000100600001000303010000080800b0f4000100000100000001006000010003030100000c080098db0701000001000000010060000100"
    "030301000014080078ba0601000001000000010060000100030301000014080060a105010000010000000100600001000303010000140800"
    "4888040100000100000001006000010003030100000808003077030100000100000001006000010003030100000808001056020100000100"
    "00000100600001000303010000080800f83c0101000001000000010060000100"
)
SIZES = [(rows, columns) for rows in (0, 1, 2, 17, 256) for columns in (64, 128, 320)]


def same(ours: Stream, theirs: Stream) -> bool:
    return np.array_equal(ours.words, theirs.words) and np.array_equal(ours.states, theirs.states)


def check(job: Decoding, symbols: U8) -> None:
    decode(job)
    assert np.array_equal(job.out, symbols.astype(np.int16) - 128)


@pytest.mark.some(7)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_bytes_and_symbols_of_the_reference(machine: str, rows: int, columns: int) -> None:
    symbols, ids = sample(rows, columns, seed=rows + columns)
    stream = encoded(symbols, in_order(ids, TABLES))
    assert same(stream, stream_of(symbols, ids))
    assert stream.words.dtype == np.uint16
    assert stream.states.dtype == np.uint32
    check(int16_job(stream, ids, rows), symbols)


def golden_sample() -> tuple[Any, Any]:
    """3 rows of 64 columns, without a random number or a logarithm."""
    ids = np.arange(64, dtype=np.uint16) % 6
    slots = (np.arange(3 * 64) * 977 % 2048).reshape(3, 64)
    return (TABLES.slots[ids.astype(np.int64) * 2048 + slots] & 255).astype(np.uint8), ids


def test_golden(machine: str) -> None:
    symbols, ids = golden_sample()
    golden = Stream.of(
        np.frombuffer(bytes.fromhex(GOLDEN_WORDS), np.uint16), np.frombuffer(bytes.fromhex(GOLDEN_STATES), np.uint32)
    )
    assert same(encoded(symbols, in_order(ids, TABLES)), golden)
    check(int16_job(golden, ids, 3), symbols)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 9), groups=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), contexts=st.booleans())
def test_encoding_any_symbols(machine: str, rows: int, groups: int, seed: int, contexts: bool) -> None:
    random, tables = np.random.default_rng(seed), table_set(seed)
    ids = random.integers(0, len(tables) - 2, 64 * groups).astype(np.uint16)
    above = random.integers(0, 3, (rows, len(ids))).astype(np.uint8)
    symbols = symbols_for(tables, ids.astype(np.int64) + above * contexts, random)
    chosen = above if contexts else None
    stream = encoded(symbols, in_order(ids, tables, refines=contexts), chosen)
    assert same(stream, reference.encode(symbols, ids, tables, chosen))
    assert np.array_equal(reference.decode(stream, rows, ids, tables, chosen), symbols)


def test_blocks_go_to_their_places(machine: str) -> None:
    symbols, ids = sample(17, 128, seed=5)
    places = np.array([101, 3, 133, 50], np.int32)
    whole = np.full((3, 17, 2, 170), 77, np.int16)
    out = whole[1, :, 1]
    decode(Decoding(stream_of(symbols, ids), Columns(ids, TABLES, places), out))
    numbers = symbols.astype(np.int16) - 128
    expected = np.full_like(whole, 77)
    for block, place in enumerate(places):
        expected[1, :, 1, place : place + 32] = numbers[:, block * 32 : block * 32 + 32]
    assert np.array_equal(whole, expected)


def test_escapes_are_replaced_in_the_streams_order(machine: str) -> None:
    random = np.random.default_rng(6)
    ids = np.resize(np.array([0, 5], np.uint16), 128)  # all symbols, or 0 and 255
    symbols = symbols_for(TABLES, np.broadcast_to(ids.astype(np.int64), (11, 128)), random)
    symbols[2:7, ids == 5] = 0
    symbols[2:7][symbols[2:7] == 255] = 254
    symbols[4, 64:] = 255
    numbers = symbols.astype(np.int16) - 128
    marks = random.integers(-32768, 32768, int((symbols == 255).sum())).astype(np.int16)
    numbers[symbols == 255] = marks
    places = np.array([101, 3, 133, 50], np.int32)
    out = np.zeros((22, 170), np.int16)
    stream, columns = stream_of(symbols, ids), Columns(ids, TABLES, places)
    decode(*[Decoding(stream, columns, out[first : first + 11], marks) for first in (11, 0)])
    for first in (0, 11):
        for block, place in enumerate(places):
            assert np.array_equal(out[first : first + 11, place : place + 32], numbers[:, block * 32 : block * 32 + 32])
    for wrong in (marks[1:], np.append(marks, marks[:1]), marks[:0]):
        for pair in ([wrong, marks], [marks, wrong]):
            with pytest.raises(DamagedError):
                decode(*[Decoding(stream, columns, out[:11], values) for values in pair])


def test_no_escapes_where_none_are_marked(machine: str) -> None:
    symbols, ids = sample(9, 64, tables=TERNARY)
    job = int16_job(stream_of(symbols, ids, TERNARY), ids, 9, TERNARY)
    check(replace(job, marked=np.empty(0, np.int16)), symbols)
    nothing = int16_job(Stream.of(np.empty(0, np.uint16), np.full(64, 1 << 16, np.uint32)), ids, 0, TERNARY)
    decode(replace(nothing, marked=np.empty(0, np.int16)))
    for rows in (job, nothing):
        with pytest.raises(DamagedError):
            decode(replace(rows, marked=np.zeros(1, np.int16)))


def test_streams_of_many_sizes_from_one_read_only_buffer(machine: str) -> None:
    parts, found = bytearray(b"odd"), []
    ids = np.resize(np.arange(len(TABLES), dtype=np.uint16), 128)
    for index in range(40):
        symbols = symbols_for(
            TABLES, np.broadcast_to(ids.astype(np.int64), (index % 5, 128)), np.random.default_rng(index)
        )
        stream = stream_of(symbols, ids)
        found.append((len(parts), len(stream.words), symbols))
        parts += stream.words.tobytes() + stream.states.tobytes()
    payload = np.frombuffer(bytes(parts), np.uint8)
    streams = []
    for at, count, _ in found:
        words = np.frombuffer(payload, np.uint16, count, at)
        states = np.frombuffer(payload, np.uint32, 64, at + 2 * count)
        streams.append(Stream(words, states, address(payload) + at))
    rows = [len(symbols) for *_, symbols in found]
    starts = [sum(rows[index + 1 :]) + len(rows) - index for index in range(len(rows))]
    out = np.full((sum(rows) + len(rows) + 1, 128), 999, np.int16)
    spans = [out[start : start + count] for start, count in zip(starts, rows, strict=True)]
    decode(*[Decoding(stream, in_order(ids, TABLES), span) for stream, span in zip(streams, spans, strict=True)])
    expected = np.full_like(out, 999)
    for start, (*_, symbols) in zip(starts, found, strict=True):
        expected[start : start + len(symbols)] = symbols.astype(np.int16) - 128
    assert np.array_equal(out, expected)


def test_nothing_to_do() -> None:
    decode()


@pytest.mark.parametrize("columns", [64, 320])
def test_refining(machine: str, columns: int) -> None:
    random = np.random.default_rng(columns)
    coarse = random.integers(-4, 5, (17, columns)).astype(np.int16)
    coarse[3] = np.resize([32767, -32768, 10923, -10923, 10922, -10922, 0], columns)
    ids = random.integers(0, len(TERNARY) - 2, columns).astype(np.uint16)
    contexts = np.minimum(np.abs(coarse.astype(np.int32)), 2).astype(np.uint8)
    symbols = symbols_for(TERNARY, ids.astype(np.int64) + contexts, random)
    places = np.arange(columns - 27, 0, -32).astype(np.int32)
    fine = Columns(ids, TERNARY, places, refines=True)
    stream = encoded(symbols, fine, contexts)
    assert same(stream, reference.encode(symbols, ids, TERNARY, contexts))
    out = np.full((17, columns + 20), -5, np.int16)
    order = (places[:, None] + np.arange(32)).reshape(-1)
    out[:, order] = coarse
    decode(Decoding(stream, fine, out))
    change = np.where(coarse < 0, 128 - symbols.astype(np.int32), symbols.astype(np.int32) - 128)
    expected = np.full_like(out, -5)
    expected[:, order] = (3 * coarse.astype(np.int32) + change).astype(np.int16)
    assert np.array_equal(out, expected)


def test_refining_by_any_number(machine: str) -> None:
    random = np.random.default_rng(2)
    ids = random.integers(0, len(TABLES) - 2, 64).astype(np.uint16)
    symbols = symbols_for(TABLES, np.broadcast_to(ids.astype(np.int64), (5, 64)), random)
    job = int16_job(stream_of(symbols, ids), ids, 5, refines=True)
    job.out[:] = 0
    check(job, symbols)


def test_two_threads(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel_for", compile_once(jit.kernel_for.__wrapped__))  # type: ignore[attr-defined]
    start = threading.Barrier(2)

    def work(seed: int) -> bool:
        symbols, ids = sample(64, 128, seed)
        stream, right = stream_of(symbols, ids), True
        start.wait()
        for _ in range(30):
            jobs = [int16_job(stream, ids, 64) for _ in range(4)]
            for job in jobs:
                decode(job)
            right &= all(np.array_equal(job.out, symbols.astype(np.int16) - 128) for job in jobs)
            right &= same(encoded(symbols, in_order(ids, TABLES)), stream)
        return right

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(work, (1, 2)))


def test_symbols_without_frequency_are_refused(machine: str) -> None:
    symbols, ids = sample(4, 64, seed=1)
    for row, column in ((0, 0), (3, 63), (2, 17)):
        wrong = symbols.copy()
        ids_ = ids.copy()
        ids_[column], wrong[:, column], wrong[row, column] = 1, 128, 129  # table 1 has symbol 128 only
        with refused(ValueError):
            encoded(wrong, in_order(ids_, TABLES))


def test_an_encoder_refuses_wrong_arrays(machine: str) -> None:
    symbols, ids = sample(4, 64)
    contexts = np.zeros((4, 64), np.uint8)
    plain = in_order(ids, TABLES)
    fine = in_order(ids % 3, TABLES, refines=True)
    bad: list[tuple[Any, Any, Any]] = [
        (symbols[:, :32], plain, None),
        (symbols.astype(np.int16), plain, None),
        (np.asfortranarray(symbols), plain, None),
        (symbols.reshape(-1), plain, None),
        (symbols, fine, contexts[:3]),
        (symbols, fine, contexts.astype(np.int8)),
        (symbols, fine, np.asfortranarray(contexts)),
        (symbols, fine, contexts + np.uint8(3)),
        (symbols, plain, contexts),
    ]
    for wrong, columns, above in bad:
        with pytest.raises(ValueError):
            encoded(wrong, columns, above)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_symbols_of_numbers(machine: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    ids = random.integers(0, len(TABLES), 128).astype(np.uint16)
    places = np.array([101, 3, 133, 50], np.int32)
    columns = Columns(ids, TABLES, places)
    numbers = random.integers(-6, 7, (rows, 170)).astype(np.int16)
    if rows:
        numbers[rows // 2] = np.resize(np.array([-32768, 32767, -129, -128, 126, 127, 128, 255, -256], np.int16), 170)
    given_ = np.ascontiguousarray(np.pad(numbers, ((0, 0), (0, 9))))[:, :170]
    ((symbols, escapes),) = symbols_of(given_[None], [columns])
    taken = np.concatenate([numbers[:, place : place + 32] for place in places], 1).astype(np.int64) + 128
    known = (taken >= 0) & (taken < 255)
    # What a table has, it has without gaps: between its least and its largest number nothing is an escape.
    low = np.array([np.flatnonzero(TABLES.frequencies[one, :255]).min(initial=999) for one in ids])
    high = np.array([np.flatnonzero(TABLES.frequencies[one, :255]).max(initial=-1) for one in ids])
    known &= (taken >= low) & (taken <= high)
    assert np.array_equal(symbols, np.where(known, taken, 255).astype(np.uint8))
    assert escapes.tolist() == (taken[~known] - 128).tolist()


def test_numbers_that_are_none_are_refused(machine: str) -> None:
    columns = in_order(np.zeros(64, np.uint16), TABLES)
    turned = np.zeros((64, 2), np.int16).T
    for wrong in (np.zeros((2, 64), np.int32), np.zeros((2, 63), np.int16), np.zeros(64, np.int16), turned):
        with pytest.raises(ValueError):
            symbols_of(wrong[None], [columns])
