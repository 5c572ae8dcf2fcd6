"""Errors of pydantic as sentences: the parameter, what is wrong with its value, and what is accepted."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

_KINDS = {"string": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
_KINDS |= {"dict": "an object", "model": "an object"}
# Code, message and hint, by the type of pydantic's error.
_SENTENCES = {
    **{
        f"{kind}_{why}": ("wrong_type", f"{{name}} must be {words}, not {{shown}}", "")
        for kind, words in _KINDS.items()
        for why in ("type", "parsing", "from_float")
    },
    "missing": ("missing", "{name} is missing", ""),
    "too_short": ("missing", "{name} is empty", ""),
    "extra_forbidden": ("unknown_parameter", "unknown parameter: {name!r}", ""),
    "literal_error": ("unsupported", "{name} cannot be {shown}", "use {expected}"),
    "string_pattern_mismatch": ("wrong_value", "{name} cannot be {shown}", "it must match {pattern}"),
    "string_too_long": ("too_long", "{name} has {length:,} characters", "at most {max_length:,}"),
    "too_long": ("too_many", "{name} has {length:,} items", "at most {max_length:,}"),
    "greater_than_equal": ("out_of_range", "{name} cannot be {shown}", "at least {ge:,}"),
    "less_than_equal": ("out_of_range", "{name} cannot be {shown}", "at most {le:,}"),
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """`path`: of the parameter, with dots; "" for the whole value. `hint`: what is accepted, or ""."""

    code: str
    path: str
    message: str
    hint: str
    value: Any

    @property
    def text(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def complaint_of(error: ValidationError) -> Complaint:
    """Describe the first error, before what is missing. A `PydanticCustomError` with a `hint` in its context keeps its
    code and its message, in which `{name}` becomes the parameter's name."""
    first = min(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
    value, limits = first["input"], first.get("ctx", {})
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    name = path or "the request"
    if "hint" in limits:
        return Complaint(first["type"], path, first["msg"].replace("{name}", name), limits["hint"], value)
    code, message, hint = _SENTENCES.get(first["type"], ("wrong_value", "{name} cannot be {shown}", ""))
    length = len(value) if isinstance(value, str | list | dict) else 0
    words = {"name": name, "shown": reprlib.repr(value), "length": length, **limits}
    return Complaint(code, path, message.format(**words), hint.format(**words).removesuffix(".0"), value)
