"""Attention by the first backend in `BACKENDS` that accepts a call; the others decline with a reason (`explain`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtool.core.common.machine import ATTENTION, asked
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention import eager, flash_cpu, sdpa, triton_rows
from kvtool.core.kernels.attention.params import KV, AttentionCall, AttentionParams, KeyRanges, Spans


class AttentionBackend(Protocol):
    name: str

    def declines(self, call: AttentionCall) -> str:
        """Return why the backend does not serve a call, or an empty string. `call.is_asked` overrules a preference.

        A call with only a device and a number format, and `asked`, says what `KVTOOL_ATTENTION` may ask for on this
        machine: a reason given there is an error to the user, any other leads to the next backend.
        """
        ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
    ) -> torch.Tensor:
        """Attend with query `[batch, heads, rows, key_dim]` over key and value `[batch, kv_heads, keys, …]`.

        Return `[batch, heads, rows, value_dim]`, best laid out with rows before heads. Row i sees the keys in `ranges`,
        which already hold the window of `params`. Keys after `ranges.last[-1]` may be undefined, NaN included, and must
        not be read. With `ranges.on_device` a row's last key is `ranges.limits`, `last` an upper bound, and every key
        is defined.
        """
        ...


# In this order; the last one declines nothing.
BACKENDS: tuple[AttentionBackend, ...] = (triton_rows, flash_cpu, sdpa, eager)


@dataclass(frozen=True, slots=True)
class Explanation:
    serves: AttentionBackend
    declined: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "; ".join([self.serves.name, *self.reasons])

    @property
    def reasons(self) -> list[str]:
        return [f"not {name}: {reason}" for name, reason in self.declined]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> torch.Tensor:
    return _backend(AttentionCall.of(query, key, value, params, ranges)).attend(query, key, value, params, ranges)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    spans: Spans,
    lead_in: KV | None = None,
) -> torch.Tensor:
    """Attend with chunks side by side, each of which sees itself and the `lead_in` only: keys and values `[1, kv_heads,
    tokens, …]`. By `flash` in one call, by other backends one after the other."""
    if _backend(AttentionCall.of(query, key, value, params)) is flash_cpu:
        return flash_cpu.attend_packed(query, key, value, params, spans, lead_in)
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    for first, count, start in spans.spans:
        sides = [side[:, :, start : start + count] for side in (key, value)]
        keys, values = sides if lead_in is None else (torch.cat(pair, 2) for pair in zip(lead_in, sides, strict=True))
        rows, places = slice(first, first + count), range(keys.shape[2] - count, keys.shape[2])
        ranges = KeyRanges.run(places, params.window, query.device)
        out[:, :, rows] = attend(query[:, :, rows], keys, values, params, ranges)
    return out


def explain(call: AttentionCall) -> Explanation:
    """Find the backend that serves a call. Raises UsageError: the one that is asked for serves nothing here."""
    declined: list[tuple[str, str]] = []
    for backend, reason in _considered(call):
        if not reason:
            return Explanation(backend, tuple(declined))
        declined.append((backend.name, reason))
    raise AssertionError("the last backend declines nothing")


def _backend(call: AttentionCall) -> AttentionBackend:
    return next(backend for backend, reason in _considered(call) if not reason)


def _considered(call: AttentionCall) -> Iterator[tuple[AttentionBackend, str]]:
    """Yield each backend with its reason to decline, in order; those before the one that is asked for all decline."""
    name, is_found = asked(ATTENTION), False
    for backend in BACKENDS:
        if not name or is_found:
            yield backend, backend.declines(call)
        elif backend.name != name:
            yield backend, f"{ATTENTION}={name}"
        else:
            is_found = True
            if unable := backend.declines(AttentionCall(call.device, call.dtype, is_asked=True)):
                raise UsageError(f"{ATTENTION}={name}: {unable}", _others(name))
            yield backend, backend.declines(call._replace(is_asked=True))


def _others(name: str) -> str:
    return f"unset {ATTENTION}, or take one of {', '.join(each.name for each in BACKENDS if each.name != name)}"


def prepare(dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and asked(ATTENTION) in ("", flash_cpu.name):
        flash_cpu.compile_ahead(dtype)
