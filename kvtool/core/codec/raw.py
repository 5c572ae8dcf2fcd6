"""Level `raw`: the model's own numbers, byte for byte."""

from __future__ import annotations

import math

import torch

from kvtool.core.codec.base import LayerKV, Payload, SelfContained, Shape, side_shapes
from kvtool.core.errors import DamagedError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Raw(SelfContained):
    """K then V, each `[kv_heads, tokens, head_dim]` in C order, little-endian (law 7: bit for bit)."""

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: object = None
    ) -> list[memoryview]:
        """Bytes of one layer's keys and values, each `[kv_heads, tokens, head_dim]`; they may be views."""
        return [side.contiguous().view(torch.uint8).numpy().reshape(-1).data for side in (keys, values)]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        """Keys and values of one layer; they share `payload`'s memory and must not be written to."""
        of_keys, of_values = side_shapes(shape)
        kind = DTYPES[dtype]
        flat = torch.frombuffer(payload, dtype=kind) if len(payload) else torch.empty(0, dtype=kind)
        keys, values = flat.split([math.prod(of_keys), math.prod(of_values)])
        try:
            return keys.view(of_keys), values.view(of_values)
        except RuntimeError as error:  # of no heads, but tokens and dimensions by the billion
            raise DamagedError("a raw payload of a shape that cannot be") from error
