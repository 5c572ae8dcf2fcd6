"""Validation of values that a shared store sends: types, lengths, bounds. An invalid value is a ValueError.

The bounds are far above what is ever written, and far below a machine's memory."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MOST_BYTES = 2**30  # of any value
MOST_NAMES = 10**7  # that a place lists; more would never end
LEAST_RATE = 1024  # bytes a second, on average, of an answer that takes longer than the timeout
MOST_LAYERS = 1000
MOST_TOKENS = 2**22  # of a chunk
MOST_LEVEL_BYTES = 2**32  # a chunk's records of one level
_MOST = {"head": 2**12, "catalogue": 2**28, "shard": 2**26, "meta": 2**24, "chunk": 2**24}  # by what a name begins with


def most_bytes(name: str) -> int:
    """Return the largest size in bytes that a value of this name may have."""
    return _MOST.get(name.partition("/")[0], MOST_BYTES)


_HEX = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MOST_NESTED = 32
_MOST_IDS = 2**20
_MOST_ID = 2**32 - 1
INT64 = 2**63 - 1


def strict_json(data: bytes | memoryview) -> Any:
    text = bytes(data).decode("utf-8", "surrogatepass")
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of bounds")
    return number


def object_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def list_of(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError("not a list of the right length")
    return value


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def name_of(value: Any) -> str:
    if not _KEY.fullmatch(text_of(value)):
        raise ValueError("not a name")
    return str(value)


def hex_of(value: Any, size: int) -> str:
    if not isinstance(value, str) or len(value) != 2 * size or not _HEX.fullmatch(value):
        raise ValueError("not bytes in hex of the right length")
    return value


def count_of(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("not a whole number within bounds")
    return value


def flag_of(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def plain(value: Any, left: int = _MOST_NESTED) -> Any:
    if left == 0:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _KEY.fullmatch(key):
                raise ValueError("a key that is no name")
            plain(inner, left - 1)
    elif isinstance(value, list):
        for inner in value:
            plain(inner, left - 1)
    elif isinstance(value, int) and not -INT64 <= value <= INT64:
        raise ValueError("a number is out of bounds")
    return value


# ---- what is known by name ----


def identity_of(value: Any) -> dict[str, Any]:
    identity: dict[str, Any] = plain(object_of(value))
    for name in ("model", "fingerprint", "dtype", "system", "namespace"):
        text_of(identity.get(name, ""))
    for name in ("prefix", "answer_header"):
        _ids(identity.get(name, []))
    lead_in = object_of(identity.get("lead_in", {}))
    text_of(lead_in.get("mode", ""))
    _ids(lead_in.get("ids", []))
    object_of(identity.get("split", {}))
    return identity


def codec_of(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = plain(object_of(value))
    if state.get("profile", "") != "":
        hex_of(state["profile"], 16)
    for row in object_of(state.get("losses", {})).values():
        for measured in object_of(row).values():
            for number in object_of(measured).values():
                if number is not None and not isinstance(number, int | float):
                    raise ValueError("a loss that is no number")
    return state


def _ids(value: Any) -> None:
    for number in list_of(value):
        count_of(number, 0, _MOST_ID)
    if len(value) > _MOST_IDS:
        raise ValueError("too many token ids")
