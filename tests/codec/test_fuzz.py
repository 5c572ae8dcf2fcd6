"""Damaged and hostile records: refused, or read as tensors of the right shape; never another error, never much memory.

A record's digest reveals damage before the codec sees any of this; these tests are for the day when it does not.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import DTYPES, Encoded
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError
from kvtool.core.native import isa as isas
from kvtool.core.native.isa import runnable
from tests.codec.synthetic import KV, STEP, Model, encoded, fitted, shelf

HEADS, TOKENS, DIM = 2, 40, 16
MUTATIONS = 10_000
HEADER = 80
COUNTS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44)  # offsets of tokens, columns, words, escapes, side information


class QuietHead(Model):
    """The second head carries nothing, so a profile leaves it out."""

    def sides(self, layer: int, tokens: int, seed: int = 0) -> torch.Tensor:
        sides = super().sides(layer, tokens, seed)
        sides[:, :, self.dim :] = sides[:, :1, self.dim :]
        return sides


MODEL = QuietHead(HEADS, DIM)
PROFILE = fitted(MODEL, groups=2, step=4 * STEP)
SHELF = shelf(PROFILE)
HUGE = (2**31, 2**32 - 1, 2**30, 65536, 64, 1, 0)


@cache
def sources() -> dict[str, tuple[str, Encoded]]:
    """Sound records by name, with their levels: with outliers, so that there are escapes of all kinds."""
    keys, values = MODEL.kv(1, TOKENS, dtype=torch.bfloat16)
    keys[0, 3, 2], values[1, 17, 15], values[0, 0, 0] = 900.0, -40.0, 77.0
    keys[1, 5:9] += torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).bfloat16() * 4
    out = {f"alone-{level}": (level, encoded(keys, values, [level], PROFILE, 1)[level]) for level in ("1", "3")}
    chain = encoded(keys, values, NESTED, PROFILE, 1)
    out |= {f"refined-{level}": (level, chain[level]) for level in ("1", "2", "3")}
    out["anchor"] = ("2", encoded(keys, values, ["2"])["2"])
    out["cachegen"] = ("cachegen-2", out["anchor"][1])
    return out


def flipped(data: bytearray, dice: random.Random) -> None:
    place = dice.randrange(len(data) if dice.random() < 0.6 else min(HEADER, len(data)))
    data[place] = dice.choice([data[place] ^ (1 << dice.randrange(8)), dice.randrange(256), 0, 255])


def cut(data: bytearray, dice: random.Random) -> None:
    first = dice.randrange(len(data))
    del data[first : dice.choice([len(data), first + dice.randint(1, 300)])]


def extended(data: bytearray, dice: random.Random) -> None:
    place = dice.choice([len(data), dice.randrange(len(data))])
    data[place:place] = dice.randbytes(dice.choice([1, 2, 4, 6, 256, 300]))


def counted(data: bytearray, dice: random.Random) -> None:
    at = dice.choice(COUNTS)
    if len(data) < HEADER:
        return
    (old,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at, dice.choice([*HUGE, (old + 1) % 2**32, max(0, old - 1), old * 2 % 2**32]))
    if dice.random() < 0.5:  # the place of as many bytes is found elsewhere
        other = dice.choice(COUNTS[2:])
        (there,) = struct.unpack_from("<I", data, other)
        struct.pack_into("<I", data, other, max(0, there - 1))


def spliced(data: bytearray, dice: random.Random) -> None:
    other = dice.choice(list(sources().values()))[1].payload
    first = dice.choice([0, 4, 8, 16, 32, 48, 64])
    end = dice.choice([8, 16, 32, 48, 64, HEADER, len(other)])
    data[first:end] = other[first:end]


def unsound_numbers(data: bytearray, dice: random.Random) -> None:
    if len(data) < HEADER + 8:
        return
    number = dice.choice([float("nan"), float("inf"), -1.0, 3e38, 1e-45, 0.0])
    struct.pack_into("<f", data, dice.choice([48, 52, 56, 60, dice.randrange(HEADER, len(data) - 4)]), number)


KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flipped, flipped, cut, extended, counted, spliced, unsound_numbers,
)  # fmt: skip


def mutated(payload: bytes, dice: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        if data:
            dice.choice(KINDS)(data, dice)
    return bytes(data)


def mutated_somewhere(item: Encoded, dice: random.Random) -> Encoded:
    """A record with a change in it or in one that it refines; or with one that it does not."""
    if item.base is not None and dice.random() < 0.5:
        base = mutated_somewhere(item.base, dice)
        if dice.random() < 0.05:
            base = dice.choice(list(sources().values()))[1]
        return Encoded(item.payload, item.shape, item.dtype, base)
    return Encoded(mutated(bytes(item.payload), dice), item.shape, item.dtype, item.base)


def outcome(level: str, items: list[Encoded]) -> list[KV] | None:
    """Tensors, checked; None where it is refused."""
    try:
        pairs = CODECS[level].decode(items, 1, SHELF)
    except DamagedError:
        return None
    for pair, item in zip(pairs, items, strict=True):
        assert all(side.shape == item.shape and side.dtype == DTYPES[item.dtype] for side in pair)
    return pairs


def same(one: list[KV] | None, other: list[KV] | None) -> bool:
    if one is None or other is None:
        return one is other
    flat = [[side.contiguous().view(torch.uint8) for pair in pairs for side in pair] for pairs in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_sound_ones_are_read() -> None:
    assert len({Record.parse(item.payload).transformed for _, item in sources().values()}) == 2
    for level, item in sources().values():
        assert outcome(level, [item]) is not None
    assert all(len(Record.parse(sources()[name][1].payload).escapes.marked) for name in ("alone-1", "anchor"))
    assert len(Record.parse(sources()["alone-1"][1].payload).escapes.places)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", sorted(sources()))
def test_mutated_records(name: str) -> None:
    """Mostly refused; where not, a tensor of the right shape (its numbers, steps or stated errors are others)."""
    dice = random.Random(name)
    level, sound = sources()[name]
    refused = 0
    count = MUTATIONS // len(sources())
    for _ in range(count):
        refused += outcome(level, [mutated_somewhere(sound, dice)]) is None
    assert 0.5 * count < refused < count


@pytest.mark.slow
def test_among_sound_ones() -> None:
    dice = random.Random(5)
    by_level = {level: [item for its, item in sources().values() if its == level] for level in ("1", "2", "3")}
    for _ in range(400):
        level = dice.choice(sorted(by_level))
        items = [dice.choice(by_level[level]) for _ in range(3)]
        bad = mutated_somewhere(items[0], dice)
        alone = outcome(level, [bad])
        place = dice.randrange(4)
        together = outcome(level, [*items[:place], bad, *items[place:]])
        assert (alone is None) == (together is None)


@pytest.mark.parametrize("name", runnable()[1:])
def test_all_instruction_sets_are_of_one_mind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(9)
    names = sorted(sources())
    for _ in range(300):
        level, sound = sources()[dice.choice(names)]
        item = mutated_somewhere(sound, dice)
        usual = outcome(level, [item])
        with monkeypatch.context() as patch:
            patch.setattr(isas, "runnable", lambda: (name,))
            assert same(outcome(level, [item]), usual)


@pytest.mark.parametrize("at", COUNTS)
@pytest.mark.parametrize("name", ["alone-1", "refined-1", "anchor"])
def test_no_memory_for_what_a_header_claims(name: str, at: int) -> None:
    level, sound = sources()[name]
    outcome(level, [sound])
    for claim in (2**31, 2**32 - 1, 2**28):
        data = bytearray(sound.payload)
        struct.pack_into("<I", data, at, claim)
        tracemalloc.start()
        assert outcome(level, [Encoded(bytes(data), sound.shape, sound.dtype, sound.base)]) is None
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1_000_000


def test_steps_and_side_information_beyond_all_bounds() -> None:
    level, sound = sources()["anchor"]
    coded = Record.parse(sound.payload)
    for step in (3e38, 1e-45, 0.0):
        data = bytearray(sound.payload)
        struct.pack_into("<2f", data, 48, step, step)
        assert outcome(level, [Encoded(bytes(data), sound.shape, sound.dtype)])
    place = bytes(sound.payload).index(coded.side)
    data = bytearray(sound.payload)
    data[place : place + 64] = b"\xff\x7e" * 32  # 1.7e38
    outcome(level, [Encoded(bytes(data), sound.shape, sound.dtype)])
    data[place : place + 4] = struct.pack("<f", float("inf"))
    assert outcome(level, [Encoded(bytes(data), sound.shape, sound.dtype)]) is None


def parsed(data: bytes) -> Record | None:
    try:
        coded = Record.parse(data)
    except DamagedError:
        return None
    assert b"".join(coded.pack()) == data
    return coded


@given(st.binary(max_size=600))
def test_any_bytes(data: bytes) -> None:
    assert parsed(data) is None or len(data) >= HEADER + 4 * 64
    assert parsed(b"kvg\x02" + data) is None or len(data) >= HEADER + 4 * 64 - 4


@pytest.mark.slow
@settings(max_examples=300)
@given(
    fields=st.tuples(
        st.integers(0, 3),  # kind
        *[st.integers(0, 5)] * 2,  # level and base
        st.integers(0, 2**32 - 1),  # tokens
        st.sampled_from([0, 32, 64, 65, 128, 2**31]),  # columns
        *[st.sampled_from([0, 1, 5, 2**31])] * 4,  # words
        *[st.sampled_from([0, 1, 3, 2**31])] * 4,  # counts
        *[st.floats(width=32, allow_nan=True)] * 4,
    ),
    rest=st.integers(0, 1200),
)
def test_any_header(fields: tuple[Any, ...], rest: int) -> None:
    coded = parsed(struct.pack("<4sH2B10I4f16s", b"kvg\x01", *fields, bytes(16)) + bytes(rest))
    if coded is not None:
        assert coded.level == fields[1]
        assert fields[2] in (0, coded.level + 1)
        assert len(coded.streams) == (1 if fields[0] else 4)


@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (3, "B", (0, 2, 3, 255)),  # format
        (4, "B", (0, 2, 3, 255)),  # transformed or not
        (5, "B", (1, 3, 255)),
        (6, "B", (0, 2, 5, 255)),  # level
        (7, "B", (1, 3, 4, 5, 255)),  # what it refines
        (12, "I", (1, 63, 2**31 + 1)),  # columns
        (40, "I", (1, 2**31)),  # check of the base, where there is one
        *[(at, "f", (-1.0, -1e-30, float("nan"), float("inf"))) for at in (48, 52, 56, 60)],
    ],
)
def test_fields_that_no_encoder_writes(at: int, form: str, values: tuple[float, ...]) -> None:
    for name in ("alone-1", "refined-1"):
        sound = bytes(sources()[name][1].payload)
        assert parsed(sound) is not None
        for value in values:
            data = bytearray(sound)
            struct.pack_into("<" + form, data, at, value)
            assert (
                parsed(bytes(data)) is None or (name, at, value) == ("alone-1", 6, 2) or (name, at) == ("refined-1", 40)
            )


@given(data=st.data())
def test_a_sound_record_cut_or_continued(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(sources())))
    payload = bytes(sources()[name][1].payload)
    assert parsed(payload) is not None
    assert parsed(payload[: data.draw(st.integers(0, len(payload) - 1))]) is None
    assert parsed(payload + data.draw(st.binary(min_size=1, max_size=9))) is None
