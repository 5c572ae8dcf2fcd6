"""A learned lead-in: keys and values that stand in for those of a warm passage."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property

import torch

from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError

FORMAT = 1
DIGEST_BYTES = 20
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class LearnedRows:
    """Trained rows of a lead-in, as chunks are prefilled behind them.

    Attributes
    ----------
    fingerprint : of the model they were trained for.
    ids : token ids whose places they take; the rows stand at the same positions.
    keys, values : `[layers, kv_heads, len(ids), head_dim]` on the CPU in the model's dtype, keys rotated.
    """

    fingerprint: str
    ids: Ids
    keys: torch.Tensor
    values: torch.Tensor

    @cached_property
    def data(self) -> bytes:
        """The rows as bytes: a JSON header behind its length, then the numbers of the keys and of the values."""
        header = {
            "kvtool_lead_in": FORMAT,
            "fingerprint": self.fingerprint,
            "ids": list(self.ids),
            "dtype": str(self.keys.dtype).removeprefix("torch."),
            "shape": list(self.keys.shape),
        }
        text = json.dumps(header, sort_keys=True).encode()
        return _SIZE.pack(len(text)) + text + _bytes(self.keys) + _bytes(self.values)

    @cached_property
    def digest(self) -> str:
        """Name of the rows, in hex: blake2b-160 of `data`."""
        return hashlib.blake2b(self.data, digest_size=DIGEST_BYTES).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> LearnedRows:
        """Read what `data` gives.

        Raises
        ------
        DamagedError : no such rows, another format, or numbers that do not fit their shape or are not finite.
        """
        whole = bytes(data)
        try:
            size = _SIZE.unpack_from(whole)[0]
            header = json.loads(whole[_SIZE.size : _SIZE.size + size])
            if header["kvtool_lead_in"] != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            dtype, shape = getattr(torch, header["dtype"]), [int(size) for size in header["shape"]]
            numbers = bytearray(whole[_SIZE.size + size :])
            ids = tuple(map(int, header["ids"]))
            if len(shape) != 4 or shape[2] != len(ids) or len(numbers) != 2 * math.prod(shape) * dtype.itemsize:
                raise ValueError("its parts do not fit each other")
            sides = torch.frombuffer(numbers, dtype=dtype).view(2, *shape)
            fingerprint = str(header["fingerprint"])
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise DamagedError(f"a learned lead-in that cannot be read: {error}") from error
        if not torch.isfinite(sides.float()).all():
            raise DamagedError("a learned lead-in with numbers that are not finite")
        return cls(fingerprint, ids, sides[0], sides[1])

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each layer, `[1, kv_heads, rows, head_dim]`."""
        return [(keys[None], values[None]) for keys, values in zip(self.keys, self.values, strict=True)]


def _bytes(numbers: torch.Tensor) -> bytes:
    return numbers.contiguous().view(torch.uint8).numpy().tobytes()
