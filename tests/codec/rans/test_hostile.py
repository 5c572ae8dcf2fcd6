"""Damaged streams: refused or read as the reference reads them, and never beyond the arrays that were given."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvtool.core.codec.rans import coder
from kvtool.core.codec.rans.coder import Decoding, decode
from kvtool.core.codec.rans.kernels_ir import Decode
from kvtool.core.codec.rans.tables import LANES, U16, Columns, Stream, in_order
from kvtool.core.errors import DamagedError
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import kernel_for
from tests.codec.rans import reference
from tests.codec.rans.streams import TABLES, TERNARY, int16_job, sample, stream_of
from tests.wording import refused

MUTATIONS = 3000
MARGIN, CANARY = 96, 4321


def mutated(stream: Stream, dice: random.Random) -> Stream:
    words, states = stream.words.copy(), stream.states.copy()
    for _ in range(dice.randint(1, 3)):
        match dice.randrange(6):
            case 0 if len(words):
                words[dice.randrange(len(words))] ^= 1 << dice.randrange(16)
            case 1 if len(words):
                words[dice.randrange(len(words))] = dice.randrange(1 << 16)
            case 2:
                states[dice.randrange(LANES)] ^= np.uint32(1 << dice.randrange(32))
            case 3:
                states[dice.randrange(LANES)] = dice.choice([0, 1, 2047, 65535, 65536, 2**32 - 1])
            case 4:
                words = words[: dice.randrange(len(words) + 1)]
            case _:
                more = np.array([dice.randrange(1 << 16) for _ in range(dice.randint(1, 80))], np.uint16)
                words = np.concatenate([words, more])
    return Stream.of(words, states)


@pytest.mark.some(2)
def test_mutations(machine: str) -> None:
    dice = random.Random(1)
    samples = [(rows, *sample(rows, columns, rows)) for rows, columns in ((1, 64), (3, 64), (2, 128))]
    streams = [(rows, ids, stream_of(symbols, ids)) for rows, symbols, ids in samples]
    refused = 0
    for _ in range(MUTATIONS):
        rows, ids, whole = dice.choice(streams)
        stream = mutated(whole, dice)
        canvas = np.full((rows + 2, len(ids) + 2 * MARGIN), CANARY, np.int16)
        out = canvas[1:-1, MARGIN:-MARGIN]
        try:
            expected = reference.decode(stream, rows, ids, TABLES)
        except DamagedError:
            refused += 1
            with pytest.raises(DamagedError):
                decode(Decoding(stream, in_order(ids, TABLES), out))
        else:
            decode(Decoding(stream, in_order(ids, TABLES), out))
            assert np.array_equal(out, expected.astype(np.int16) - 128)
        out[:] = CANARY
        assert (canvas == CANARY).all()
    assert 0.9 * MUTATIONS < refused < MUTATIONS  # a few mutations undo one another


def together(streams: Sequence[Stream], ids: U16, rows: int) -> list[Decoding]:
    out = np.zeros((len(streams), rows, len(ids)), np.int16)
    return [Decoding(stream, in_order(ids, TABLES), part) for stream, part in zip(streams, out, strict=True)]


def test_words_of_the_next_stream_are_not_ones_own(machine: str) -> None:
    """The words that a truncated stream lacks follow right after it, where a kernel may read."""
    symbols, ids = sample(8, 64, seed=3)
    stream = stream_of(symbols, ids)
    for cut in (1, 2, 40):
        short = Stream.of(stream.words[:-cut], stream.states)
        behind = Stream.of(stream.words[len(stream.words) - cut :], stream.states)
        with pytest.raises(DamagedError):
            decode(*together([short, behind], ids, 8))


def test_one_bad_stream_among_many(machine: str) -> None:
    symbols, ids = sample(8, 64, seed=4)
    stream = stream_of(symbols, ids)
    for bad in (
        Stream.of(stream.words[:-1], stream.states),
        Stream.of(np.append(stream.words, np.uint16(0)), stream.states),
        Stream.of(stream.words, stream.states[::-1].copy()),
    ):
        for place in range(3):
            streams = [bad if index == place else stream for index in range(3)]
            with pytest.raises(DamagedError):
                decode(*together(streams, ids, 8))


def test_a_stream_without_rows(machine: str) -> None:
    ids = np.zeros(64, np.uint16)
    nothing, states = np.empty(0, np.uint16), np.full(LANES, 1 << 16, np.uint32)
    decode(int16_job(Stream.of(nothing, states), ids, 0))
    off = states.copy()
    off[63] += 1
    for bad in (Stream.of(np.zeros(1, np.uint16), states), Stream.of(nothing, off)):
        with pytest.raises(DamagedError):
            decode(int16_job(bad, ids, 0))


def test_wrong_sizes_and_ids(machine: str) -> None:
    ids = sample(2, 64)[1]
    wide = np.full(64, len(TABLES), np.uint16)
    with pytest.raises(DamagedError):
        in_order(ids[:32], TABLES)
    with refused(DamagedError):
        in_order(wide, TABLES)
    in_order(wide - np.uint16(2), TABLES)
    with refused(DamagedError):
        in_order(wide - np.uint16(2), TABLES, refines=True)


def test_a_callers_mistakes(machine: str) -> None:
    symbols, ids = sample(2, 64)
    good = int16_job(stream_of(symbols, ids), ids, 2)
    fixed = good.out.copy()
    fixed.flags.writeable = False
    bits = good.out.view(np.uint16)
    bad: list[dict[str, Any]] = [
        {"columns": Columns(ids, TABLES, np.array([0, 33], np.int32))},
        {"columns": Columns(ids, TABLES, np.array([0, 2**31 - 1], np.int32))},
        {"out": good.out.astype(np.int32)},
        {"out": bits},
        {"out": np.zeros((2, 20), np.int16)},
        {"out": np.zeros((64, 2), np.int16).T},
        {"out": np.zeros(128, np.int16)},
        {"out": fixed},
        {"marked": np.zeros(1, np.uint16)},
        {"marked": np.zeros((1, 1), np.int16)},
        {"marked": np.zeros(4, np.int16)[::2]},
        {"out": np.zeros((2, 64), np.float32)},
    ]
    for change in bad:
        with pytest.raises(ValueError):
            decode(dataclasses.replace(good, **change))
    fine = in_order(ids % 3, TABLES, refines=True)
    with pytest.raises(ValueError):
        decode(dataclasses.replace(good, columns=fine, marked=np.empty(0, np.int16)))


def test_mistakes_of_columns() -> None:
    ids, places = np.zeros(64, np.uint16), np.array([0, 32], np.int32)
    bad: list[tuple[Any, Any]] = [
        (ids, np.array([-1, 32], np.int32)),
        (ids, places[:1]),
        (ids, places.astype(np.int64)),
        (ids, places[:, None]),
        (ids, places[::-1]),
        (ids.astype(np.int32), places),
        (ids[:, None], places),
    ]
    for wrong in bad:
        with pytest.raises(ValueError):
            Columns(wrong[0], TABLES, wrong[1])


def test_jobs_that_refine_are_not_decoded_with_others() -> None:
    symbols, ids = sample(1, 64, tables=TERNARY)
    stream = stream_of(symbols, ids, TERNARY)
    jobs = [int16_job(stream, np.zeros(64, np.uint16), 1, TERNARY, refines) for refines in (False, True)]
    with refused(ValueError):
        decode(*jobs)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by ctypes")
@pytest.mark.parametrize("refines", [False, True])
@pytest.mark.parametrize("name", runnable())
def test_a_kernel_reads_nothing_behind_a_stream(name: str, refines: bool) -> None:
    """The page after the states ends the process when it is read. All lanes ask for words in the same steps."""
    kernel = kernel_for(ISAS[name], Decode(refines))
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    ids, tables = np.zeros(128, np.uint16), TERNARY if refines else TABLES
    for count in (0, 1, 7, 40, 64, 200):
        at = page - 4 * LANES - 2 * count
        states = np.frombuffer(memory, np.uint32, LANES, page - 4 * LANES)
        states[:] = 2**32 - 1
        stream = Stream(np.frombuffer(memory, np.uint16, count, at), states, begin + at)
        ((read, _),) = coder.run(kernel, [int16_job(stream, ids, 300, tables)])
        assert ~read > count + 64
    libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 3)
