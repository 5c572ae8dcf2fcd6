"""A chunk's records at one level as a safetensors file, and back: raw ones as tensors that everybody can read, others
as their bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from kvtool.core.cache.record import Bytes, KVHeader, decode_record, encode_record
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.errors import DamagedError
from kvtool.core.remote import checks

Part = tuple[str, list[int], Bytes]  # dtype as safetensors names it, shape, bytes

MOST_HEADER = 2**24
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


def to_safetensors(chunk_id: bytes, level: str, records: Sequence[bytes]) -> bytes:
    """Records of all layers as one file: `layers.N.k` and `layers.N.v`, or `layers.N` for what is encoded.

    Raises
    ------
    DamagedError : one is no record of this chunk.
    """
    parts: dict[str, Part] = {}
    for layer, record in enumerate(records):
        header, payload = decode_record(chunk_id, record)
        if level_of(level).verbatim:
            shape, name = [header.kv_heads, header.tokens], _NAMES[header.dtype]
            parts[f"layers.{layer}.k"] = (name, [*shape, header.head_dim_k], payload[: header.k_bytes])
            parts[f"layers.{layer}.v"] = (name, [*shape, header.head_dim_v], payload[header.k_bytes :])
        else:
            parts[f"layers.{layer}"] = ("U8", [len(record)], record)
    return _written(parts, {"chunk": chunk_id.hex(), "level": level})


def from_safetensors(chunk_id: bytes, level: str, layers: int, data: Bytes) -> list[bytes]:
    """Inverse of :func:`to_safetensors`; what the records are worth their own digests say.

    Raises
    ------
    DamagedError : it is no such file.
    """
    try:
        parts = _read(memoryview(data))
        if not level_of(level).verbatim:
            return [bytes(parts[f"layers.{layer}"][2]) for layer in range(layers)]
        return [
            _raw(chunk_id, layer, parts[f"layers.{layer}.k"], parts[f"layers.{layer}.v"]) for layer in range(layers)
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"KV that cannot be read: {error!r}") from error


def _raw(chunk_id: bytes, layer: int, keys: Part, values: Part) -> bytes:
    (dtype, (heads, tokens, dim_k), k_bytes), (other, (heads_v, tokens_v, dim_v), v_bytes) = keys, values
    if (dtype, heads, tokens) != (other, heads_v, tokens_v):
        raise ValueError("keys and values do not fit each other")
    header = KVHeader(_DTYPES[dtype], heads, tokens, dim_k, dim_v, RAW, layer)
    return encode_record(chunk_id, header, [k_bytes, v_bytes])


# ---- the format (https://github.com/huggingface/safetensors) -----------------------------------------------------


def _written(parts: dict[str, Part], about: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": about}
    at = 0
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, _, data in parts.values())])


def _read(data: memoryview) -> dict[str, Part]:
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MOST_HEADER, len(data) - 8):
        raise ValueError("its header is cut off")
    header, body = checks.object_of(checks.strict_json(data[8 : 8 + size])), data[8 + size :]
    header.pop("__metadata__", None)
    parts: dict[str, Part] = {}
    for name, row in header.items():
        facts = checks.object_of(row)
        start, stop = (checks.count_of(number, 0, len(body)) for number in checks.list_of(facts["data_offsets"], 2))
        shape = [checks.count_of(number, 0, 2**32 - 1) for number in checks.list_of(facts["shape"])]
        if stop - start != math.prod(shape) * _SIZES[facts["dtype"]]:
            raise ValueError(f"{name} has not the bytes of its shape")
        parts[name] = (facts["dtype"], shape, body[start:stop])
    return parts
