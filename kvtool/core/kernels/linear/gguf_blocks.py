"""Tensors of a GGUF file as matrices, number for number.

Blocks: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtool.core.kernels.linear.qtensor import Matrix, none, packed_codes

# What blocks hold: codes `[blocks, columns]`, scales, mins; float16 `[blocks, 1]`, or the bytes of a `Matrix`'s blocks.
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def matrix_of_blocks(kind: str, blocks: torch.Tensor, rows: int, columns: int) -> Matrix:
    """Make a matrix of a tensor's bytes.

    Parameters
    ----------
    kind : one of READERS.
    blocks : all bytes of the tensor, uint8; rows behind each other.

    Raises
    ------
    ValueError : too few or too many bytes, or a scale that is no finite number.
    """
    width, bits, read = READERS[kind]
    codes, scales, mins = read(blocks.view(-1, width))
    data = packed_codes(codes.view(rows, columns), bits)
    matrix = Matrix(kind, rows, columns, data, *(part.view(rows, -1) if len(part) else part for part in (scales, mins)))
    _check_finite(matrix)
    return matrix


def _check_finite(matrix: Matrix) -> None:
    factors = [matrix.scales, matrix.mins]
    if matrix.layout.blocks:
        halves = 2 * (1 + matrix.layout.mins)
        factors = [matrix.scales.view(-1, matrix.layout.block_bytes)[:, :halves].contiguous().view(torch.float16)]
    if not all(bool(part.isfinite().all()) for part in factors):
        raise ValueError("a scale is not a finite number")


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """16 bytes of 32 codes: the low halves are the first 16."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], 1)


def _fifth(bytes_: torch.Tensor) -> torch.Tensor:
    """32 bits, the lowest first, as the fifth of 32 codes."""
    bits = (bytes_[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1) << 4


def _fields(bytes_: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """Codes of `width` bits: of each `run` bytes first all lowest, then the next."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    fields: torch.Tensor = (bytes_.reshape(len(bytes_), -1, 1, run) >> shifts) & (2**width - 1)
    return fields.flatten(1)


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), none()


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), none()


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6]), _half(blocks, 0), none()


def _q5_1(blocks: torch.Tensor) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q2_k(blocks: torch.Tensor) -> _Parts:
    scales = [blocks[:, 80:84], blocks[:, :16] & 15, blocks[:, :16] >> 4]
    return _fields(blocks[:, 16:80], 2, 32), torch.cat(scales, 1), none()


def _q3_k(blocks: torch.Tensor) -> _Parts:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = [blocks[:, 108:110], (low | high << 4) - 32]  # of uint8: what is below 0 comes out as int8 has it
    return _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2, torch.cat(scales, 1), none()


def _k_scales(packed: torch.Tensor) -> torch.Tensor:
    """12 bytes: 8 scales and 8 mins of six bits."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 63, (third & 15) | (first >> 6 << 4)]
    mins = [second & 63, (third >> 4) | (second >> 6 << 4)]
    return torch.cat([*scales, *mins], 1)


def _q4_k(blocks: torch.Tensor) -> _Parts:
    scales = torch.cat([blocks[:, :4], _k_scales(blocks[:, 4:16])], 1)
    return _fields(blocks[:, 16:], 4, 32), scales, none()


def _q5_k(blocks: torch.Tensor) -> _Parts:
    scales = torch.cat([blocks[:, :4], _k_scales(blocks[:, 4:16])], 1)
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes, scales, none()


def _q6_k(blocks: torch.Tensor) -> _Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return codes, torch.cat([blocks[:, 208:], blocks[:, 192:208]], 1), none()


# Bytes of a block, bits of a code, and what takes it apart; named in LAYOUTS and by GGUF alike.
READERS: dict[str, tuple[int, int, Callable[[torch.Tensor], _Parts]]] = {
    "q8_0": (34, 8, _q8_0),
    "q4_0": (18, 4, _q4_0),
    "q4_1": (20, 4, _q4_1),
    "q5_0": (22, 5, _q5_0),
    "q5_1": (24, 5, _q5_1),
    "q2_k": (84, 2, _q2_k),
    "q3_k": (110, 3, _q3_k),
    "q4_k": (144, 4, _q4_k),
    "q5_k": (176, 5, _q5_k),
    "q6_k": (210, 6, _q6_k),
}
