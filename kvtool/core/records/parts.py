"""Tensors and the bytes of a part of a stretch: a line that says what they are, then their numbers as they stand.

::

    4 bytes     length of the line, little-endian
    line        JSON: [[name, dtype, [sizes]], …], padded with spaces to a multiple of 64 less 4 bytes
    numbers     of each tensor in C order, each padded to a multiple of 64 bytes
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from kvtool.core.codec.raw import DTYPES, NAMES
from kvtool.core.errors import DamagedError

_ALIGN = 64
_LENGTH = 4
_MOST_SIZES = 8


def encode_part(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Make the payload of a part."""
    line = json.dumps([[name, NAMES[one.dtype], list(one.shape)] for name, one in tensors.items()]).encode()
    line += b" " * (-(len(line) + _LENGTH) % _ALIGN)
    return b"".join([len(line).to_bytes(_LENGTH, "little"), line, *(_numbers(one) for one in tensors.values())])


def _numbers(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data + b"\0" * (-len(data) % _ALIGN)


def decode_part(payload: memoryview) -> dict[str, torch.Tensor]:
    """Make the tensors of a payload: views into its memory.

    Raises
    ------
    DamagedError : it holds something else than it says.
    """
    try:
        stop = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
        return dict(_tensors(json.loads(bytes(payload[_LENGTH:stop])), payload, stop))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"a part of a stretch cannot be read: {type(error).__name__}") from error


def _tensors(
    rows: Sequence[tuple[str, str, list[int]]], payload: memoryview, start: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind, sizes in rows:
        dtype = DTYPES[kind]
        if len(sizes) > _MOST_SIZES or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("no sizes")
        stop = start + math.prod(sizes) * dtype.itemsize
        if stop > payload.nbytes:
            raise ValueError("truncated")
        flat = torch.frombuffer(payload[start:stop], dtype=dtype) if stop > start else torch.empty(0, dtype=dtype)
        yield str(name), flat.view(sizes)
        start = stop + -stop % _ALIGN
    if start != payload.nbytes:
        raise ValueError("another length than it says")
