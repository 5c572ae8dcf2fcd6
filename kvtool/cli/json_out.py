"""JSON as every command gives it (kvtool/docs/json.md)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtool.cli.terminal import degrade
from kvtool.core.common.json_text import escaped
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import KvtoolError

SCHEMA = 2


def to_json(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """JSON that any parser takes and no terminal obeys: no NaN, and escapes also where the stream's encoding needs
    them."""
    known = plain(value)
    text = escaped(json.dumps(known, ensure_ascii=False, allow_nan=False, indent=indent))
    return text if degrade(text, encoding) == text else escaped(json.dumps(known, allow_nan=False, indent=indent))


def error_json(error: KvtoolError, exit_code: int | None = None) -> dict[str, Any]:
    """An error as every object and event has it: `message`, `hint`, `exit_code`; without passwords of URLs."""
    code = error.exit_code if exit_code is None else exit_code
    return {"message": scrubbed(error.message), "hint": scrubbed(error.hint), "exit_code": code}


def plain(value: Any) -> Any:
    """Dataclasses, mappings, tuples, paths and numpy scalars as what `json` knows; a number that is none as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} cannot be put as JSON")
