"""Levels `raw` and `lossless`: every bit comes back; damage is found before memory is taken."""

from __future__ import annotations

import random
import struct

import pytest
import torch
import zstandard

from kvtool.core.codec.base import shape_of
from kvtool.core.codec.lossless import Lossless, Raw
from kvtool.core.errors import DamagedError
from tests.wording import refused

CODEC = Lossless("lossless")
GOLDEN = bytes.fromhex(
    # [1, 2, 3] bfloat16: keys 0, -0, 1, -2.5, inf, 3 and values 1e-30 … 3e38; written by format version 1
    "0f0000000f00000028b52ffd200631000000007f80ff8028b52ffd20063100001b757b81a0fe00010041008044079ac02bc4"
)
GOLDEN_SIDES = (
    torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), 3.0]).bfloat16().view(1, 2, 3),
    torch.tensor([1e-30, -1e-3, 0.1, 7.0, -1e10, 3e38]).bfloat16().view(1, 2, 3),
)


def bits(side: torch.Tensor) -> bytes:
    return side.contiguous().view(torch.uint8).numpy().tobytes()


def encoded(*sides: torch.Tensor) -> bytes:
    return b"".join(CODEC.encode(*sides))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_smaller_than_raw(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 2, 256, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    size = len(encoded(keys, values))
    assert size < (keys.nbytes + values.nbytes) / {2: 1.15 if dtype == torch.float16 else 1.4, 4: 1.17}[dtype.itemsize]


def test_golden_bytes() -> None:
    decoded = CODEC.decode_one(GOLDEN, (1, 2, 3), "bfloat16")
    assert [bits(side) for side in decoded] == [bits(side) for side in GOLDEN_SIDES]


def test_the_layout() -> None:
    first, second = struct.unpack_from("<2I", GOLDEN)
    assert len(GOLDEN) == 8 + first + second + 12
    assert zstandard.ZstdDecompressor().decompress(GOLDEN[8 : 8 + first]) == bytes([0, 0, 127, 128, 255, 128])
    assert GOLDEN[8 + first + second :][:6] == bytes([0, 1, 0, 65, 0, 128])


BOMB = zstandard.ZstdCompressor().compress(bytes(2**30))
FITS = (1, 2, 3)


@pytest.mark.parametrize(
    ("payload", "shape"),
    [
        *((GOLDEN[:size], FITS) for size in (0, 7, 8, 20)),
        *((GOLDEN, shape) for shape in ((1, 2, 2), (1, 2, 4), (2**16, 2**16, 2**16))),
        (struct.pack("<2I", len(BOMB), len(BOMB)) + BOMB + BOMB + bytes(12), FITS),  # which claims two gigabytes
    ],
    ids=lambda given: str(len(given)),
)
def test_payloads_that_do_not_fit(payload: bytes, shape: tuple[int, int, int]) -> None:
    with pytest.raises(DamagedError):
        CODEC.decode_one(payload, shape, "bfloat16")


def test_mutated_payloads_give_an_error_or_a_tensor() -> None:
    chance = random.Random(5)
    keys, values = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    sound = encoded(keys, values)
    for _ in range(3000):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            decoded = CODEC.decode_one(data, (2, 40, 8), "bfloat16")
        except DamagedError:
            continue
        assert all(side.shape == (2, 40, 8) and side.dtype == torch.bfloat16 for side in decoded)


# ---- level raw: its layout (that it loses nothing is law 7) ----


def test_keys_then_values_little_endian_in_c_order() -> None:
    keys = torch.arange(12, dtype=torch.float32).view(2, 3, 2)
    data = b"".join(Raw("raw").encode(keys, -keys))
    assert data == struct.pack("<24f", *range(12), *(-float(number) for number in range(12)))


def test_decoding_copies_nothing() -> None:
    payload = bytearray(b"".join(Raw("raw").encode(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))))
    keys, values = Raw("raw").decode_one(payload, (1, 2, 2), "float32")
    payload[0:4] = struct.pack("<f", 7.0)
    assert keys[0, 0, 0] == 7
    assert values.storage_offset() == 4


@pytest.mark.parametrize("codec", [Raw("raw"), CODEC])
def test_a_record_without_tokens_holds_none(codec: Raw | Lossless) -> None:
    payload = b"".join(codec.encode(*torch.empty((2, 2, 0, 4), dtype=torch.bfloat16)))
    keys, values = codec.decode_one(payload, shape_of(2, 0, 4, 4), "bfloat16")
    assert keys.shape == values.shape == (2, 0, 4)
    with refused(DamagedError):
        codec.decode_one(payload, shape_of(0, 2**32 - 1, 2**32 - 1, 2**32 - 1), "bfloat16")
