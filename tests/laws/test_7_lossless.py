"""Law 7: decode(encode(x)) of a lossless level is x, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import DTYPES, NAMES, Codec, Encoded
from kvtool.core.codec.levels import LEVELS, exact, level_of, lossy
from kvtool.core.codec.lossless import Raw
from tests.codec import synthetic

LOSSLESS = exact()
SHAPES = [(2, 5, 16), (1, 1, 1), (3, 1, 7), (8, 33, 80), (1, 256, 5)]
_BITS = {2: torch.int16, 4: torch.int32}
_SPECIAL = {
    "float32": [0x7F800001, 0x7FC00123, -1, 0x7F800000, -0x80000000, 1],  # NaNs with payloads, ∞, -0, a subnormal
    "bfloat16": [0x7F81, 0x7FC3, -1, 0x7F80, -0x8000, 1],
    "float16": [0x7C01, 0x7E03, -1, 0x7C00, -0x8000, 1],
}


def any_bits(shape: tuple[int, int, int], dtype: str, seed: int) -> torch.Tensor:
    """Any bit pattern at all, the special ones first."""
    integer = _BITS[DTYPES[dtype].itemsize]
    limits = torch.iinfo(integer)
    chosen = torch.randint(limits.min, limits.max, shape, dtype=integer, generator=torch.Generator().manual_seed(seed))
    special = torch.tensor(_SPECIAL[dtype][: chosen.numel()], dtype=torch.int64).to(integer)
    chosen.view(-1)[: len(special)] = special
    return chosen.view(DTYPES[dtype])


def holds(codec: Codec, keys: torch.Tensor, values: torch.Tensor) -> None:
    payload = bytearray(b"".join(codec.encode_layers([(keys, values)])[0]))
    shape = tuple(keys.shape)
    decoded = codec.decode([Encoded(payload, shape, NAMES[keys.dtype])])[0]
    for given, got in zip((keys, values), decoded, strict=True):
        assert got.dtype == given.dtype
        assert got.shape == given.shape
        integer = _BITS[given.dtype.itemsize]
        assert torch.equal(got.contiguous().view(integer), given.contiguous().view(integer))


def test_a_level_is_a_codec() -> None:
    assert [*LEVELS] == [*CODECS] == [*LOSSLESS, *lossy()]
    assert LOSSLESS
    assert lossy()


@pytest.mark.parametrize("level", lossy())
def test_a_lossy_level_is_within_the_error_that_it_states(level: str) -> None:
    sides, of = synthetic.model().kv(0, 40, seed=3), synthetic.profile()
    payload = bytearray(b"".join(CODECS[level].encode_layers([sides], of)[0]))
    decoded = CODECS[level].decode([synthetic.item_of(payload, sides[0])], 0, synthetic.shelf(of))[0]
    for given, got, stated in zip(sides, decoded, CODECS[level].stated_error(payload), strict=True):
        wrong = (got - given).square().mean().sqrt() / given.square().mean().sqrt()
        if level_of(level_of(level).inner).lossless:  # what it loses is rows, none of which was left out here
            assert wrong == stated == 0
        else:
            assert 0 < wrong <= stated * 1.01


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LOSSLESS)
def test_bit_for_bit(level: str, dtype: str, shape: tuple[int, int, int]) -> None:
    holds(CODECS[level], any_bits(shape, dtype, 1), any_bits(shape, dtype, 2))


@pytest.mark.parametrize("level", LOSSLESS)
def test_of_a_view(level: str) -> None:
    """Strides are the encoder's business: a slice and a transposed tensor are encoded as what they show."""
    whole = any_bits((4, 20, 6), "bfloat16", 3)
    holds(CODECS[level], whole[:, 3:9], whole[:, 10:16])
    holds(CODECS[level], whole.transpose(0, 1), whole.transpose(0, 1))


@pytest.mark.parametrize("level", LOSSLESS)
def test_the_same_bytes_for_the_same_numbers(level: str) -> None:
    sides = any_bits((2, 9, 8), "float16", 4), any_bits((2, 9, 8), "float16", 5)
    assert CODECS[level].encode_layers([sides]) == CODECS[level].encode_layers([tuple(side.clone() for side in sides)])


class _Swapped(Raw):
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
        return super().encode(values, keys)


class _Rounded(Raw):
    """Through another dtype and back."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
        return super().encode(*(side.to(torch.float16).to(side.dtype) for side in (keys, values)))


class _Canonical(Raw):
    """One NaN for all NaNs."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
        return super().encode(*(side.nan_to_num(float("nan")) for side in (keys, values)))


class _Transposed(Raw):
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
        return super().encode(*(side.transpose(0, 1) for side in (keys, values)))


@pytest.mark.parametrize(
    "broken", [kind("raw") for kind in (_Swapped, _Rounded, _Canonical, _Transposed)], ids=lambda c: type(c).__name__
)
def test_a_broken_codec_is_caught(broken: Codec) -> None:
    with pytest.raises(AssertionError):
        holds(broken, any_bits((2, 5, 16), "bfloat16", 1), any_bits((2, 5, 16), "bfloat16", 2))
