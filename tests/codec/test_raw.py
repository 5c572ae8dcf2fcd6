"""The layout of level `raw`. (That it loses nothing is law 7.)"""

from __future__ import annotations

import struct

import pytest
import torch

from kvtool.core.codec.base import shape_of
from kvtool.core.codec.lossless import Raw
from kvtool.core.errors import DamagedError


def test_keys_then_values_little_endian_in_c_order() -> None:
    keys = torch.arange(12, dtype=torch.float32).view(2, 3, 2)
    data = b"".join(Raw("raw").encode(keys, -keys))
    assert data == struct.pack("<24f", *range(12), *(-float(number) for number in range(12)))


def test_two_bytes_a_number_in_half_precision() -> None:
    sides = torch.zeros(2, 7, 5, dtype=torch.bfloat16), torch.ones(2, 7, 5, dtype=torch.bfloat16)
    assert [len(part) for part in Raw("raw").encode(*sides)] == [140, 140]


def test_decoding_copies_nothing() -> None:
    payload = bytearray(b"".join(Raw("raw").encode(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))))
    keys, values = Raw("raw").decode_one(payload, (1, 2, 2), "float32")
    payload[0:4] = struct.pack("<f", 7.0)
    assert keys[0, 0, 0] == 7
    assert values.storage_offset() == 4


def test_from_the_middle_of_a_record() -> None:
    """A payload behind a header: a view that does not start the buffer."""
    sides = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    record = bytearray(64) + bytearray(b"".join(Raw("raw").encode(*sides)))
    decoded = Raw("raw").decode_one(memoryview(record)[64:], (2, 3, 4), "float32")
    assert all(torch.equal(a, b) for a, b in zip(sides, decoded, strict=True))


def test_a_record_without_tokens_holds_none() -> None:
    keys, values = Raw("raw").decode_one(b"", shape_of(2, 0, 4, 4), "bfloat16")
    assert keys.shape == values.shape == (2, 0, 4)
    with pytest.raises(DamagedError, match="shape"):
        Raw("raw").decode_one(b"", shape_of(0, 2**32 - 1, 2**32 - 1, 2**32 - 1), "bfloat16")
