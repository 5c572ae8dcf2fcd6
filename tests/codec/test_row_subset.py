"""Levels that leave rows out: the rows come back, with their numbers; impossible ones are refused."""

from __future__ import annotations

import struct

import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import LEVELS, SHARES, WHOLE, keeping, known, level_of, lossy, nested, profiled, whole
from kvtool.core.codec.row_subset import inner_of, rows_of, tail_of
from kvtool.core.codec.transform import encode_rows, some_rows
from kvtool.core.errors import DamagedError
from tests.codec.synthetic import model, profile, shelf
from tests.wording import refused

TOKENS, ROWS = 37, (0, 1, 2, 3, 9, 17, 36)
SPARSE = [level for level in LEVELS if level not in WHOLE]


def records(level: str, rows: tuple[int, ...] = ROWS) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Encoded]]:
    kvs = [model().kv(layer, TOKENS) for layer in range(3)]
    made = encode_rows(kvs, rows, level, profile())
    keys, _ = kvs[0]
    return kvs, [Encoded(bytearray().join(parts), tuple(keys.shape), "float32") for parts in made]


def test_names() -> None:
    kept = [level for level in WHOLE if not level_of(level).baseline]
    assert {keeping(level, share) for level in kept for share in SHARES} == {*SPARSE}
    assert whole() == [*WHOLE]
    assert keeping("2", 100) == "2"
    assert not set(SPARSE) & {*nested()}
    named = [level for level in profiled() if level in SPARSE]
    assert {*named} == {keeping(level, share) for level in nested() for share in SHARES}
    assert [level for level in lossy() if level in SPARSE] == SPARSE
    assert known(["keep50-2", "2", "keep75-3", "3"]) == ["2", "3", "keep50-2", "keep75-3"]  # the smallest last


@pytest.mark.parametrize("level", SPARSE)
def test_the_rows_come_back(level: str) -> None:
    kvs, items = records(level)
    assert {rows_of(item) for item in items} == {ROWS}
    inner = CODECS[level_of(level).inner]
    expected = inner.decode_layers([inner_of(item) for item in items], shelf(profile()))
    one_by_one = [CODECS[level].decode([item], layer, shelf(profile()))[0] for layer, item in enumerate(items)]
    for back in (CODECS[level].decode_layers(items, shelf(profile())), one_by_one):
        for own, made, right in zip(back, expected, some_rows(kvs, ROWS), strict=True):
            for side, other, exact in zip(own, made, right, strict=True):
                assert torch.equal(side, other)
                assert side.shape == exact.shape
                if WHOLE[level_of(level).inner].lossless:
                    assert torch.equal(side, exact)
    assert CODECS[level].stated_error(items[0].payload) == inner.stated_error(inner_of(items[0]).payload)


def test_several_chunks_at_once() -> None:
    (_, one), (_, other) = records("keep50-2"), records("keep50-2", (0, 5))
    made = CODECS["keep50-2"].decode([one[1], other[1]], 1, shelf(profile()))
    assert [keys.shape[1] for keys, _ in made] == [7, 2]


def with_tail(tail: bytes, tokens: int = TOKENS) -> Encoded:
    _, items = records("keep50-raw")
    item = items[0]
    return Encoded(bytearray(bytes(inner_of(item).payload) + tail), (2, tokens, 24), "float32")


@pytest.mark.parametrize(
    "item",
    [
        Encoded(b"", (2, TOKENS, 24), "float32"),
        Encoded(b"x" * 40, (2, TOKENS, 24), "float32"),
        with_tail(tail_of(ROWS, TOKENS)[:-1]),
        with_tail(tail_of(ROWS, TOKENS), TOKENS + 1),  # of a chunk of another length
        with_tail(tail_of(ROWS[:-1], TOKENS)),  # fewer rows than there are numbers of
        with_tail(b"\xff" * 5 + struct.pack("<II4s", TOKENS, TOKENS, b"kvk\1")),  # bits after the last token
        with_tail(tail_of(ROWS, TOKENS)[:5] + struct.pack("<II4s", TOKENS, 8, b"kvk\1")),
        with_tail(struct.pack("<II4s", 2**32 - 1, 7, b"kvk\1")),
        with_tail(tail_of(ROWS, TOKENS)[:-1] + b"\2"),  # a later format
        Encoded(tail_of((), TOKENS), (2, TOKENS, 24), "float32"),  # no row at all
    ],
)
def test_a_record_that_cannot_be_is_damaged(item: Encoded) -> None:
    with pytest.raises(DamagedError):
        CODECS["keep50-raw"].decode([item])


def test_layers_of_one_chunk_hold_the_same_rows() -> None:
    (_, one), (_, other) = records("keep50-2"), records("keep50-2", (0, 5))
    with refused(DamagedError):
        CODECS["keep50-2"].decode_layers([one[0], other[1]])


def test_the_bytes() -> None:
    _, items = records("keep50-raw")
    assert bytes(items[0].payload[-17:]) == bytes.fromhex("0f02020010") + struct.pack("<II4s", 37, 7, b"kvk\1")
    assert len(items[0].payload) == 2 * 2 * 7 * 24 * 4 + 17
