"""The backends for scattered rows side by side: off from the formula by how much, and milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvtool.core.kernels.attention import sdpa, triton_rows
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.kernels.attention.triton_rows import Tile
from samples.benchmarks.gpu_day.day import Day, milliseconds

_TILES = (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 4, 3))


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    keys: int
    rows: int


_HEADS = {"qwen3-0.6b": (16, 8, 128), "llama-3.1-8b": (32, 8, 128), "qwen3-14b": (40, 8, 128), "smollm2": (9, 3, 64)}


def run(day: Day) -> None:
    for case in _small(day):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            day.step(f"right: {case.name}, {dtype}", partial(_right, day, case, dtype), least_s=20)
    for case in [] if day.dry else _large():
        day.step(f"fast: {case.name}", partial(_fast, day, case), least_s=30)


def _small(day: Day) -> list[Case]:
    """Odd sizes: one row, all rows, head dims that are no power of two, more heads a group than a power of two."""
    cases = [
        Case("one row", 14, 2, 64, 777, 1),
        Case("few rows", 8, 2, 96, 1000, 37),
        Case("all rows", 6, 2, 80, 333, 333),
    ]
    cases += [Case("many keys", 8, 2, 128, 9001, 200), Case("wide heads", 4, 1, 256, 500, 100)]
    return cases[:1] if day.dry else cases


def _large() -> list[Case]:
    cases = []
    for name, shape in _HEADS.items():
        for keys in (4096, 16384, 65536):
            cases += [Case(f"{name}, {keys} keys, {rows} rows", *shape, keys, rows) for rows in (32, keys // 6, keys)]
    return cases


def _made(day: Day, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator(day.device).manual_seed(case.rows)
    query = torch.randn((1, case.rows, case.heads, case.head_dim), generator=draw, device=day.device).transpose(1, 2)
    sides = torch.randn((2, 1, case.kv_heads, case.keys + 8, case.head_dim), generator=draw, device=day.device)
    at = torch.randperm(case.keys, generator=draw, device=day.device)[: case.rows].sort().values
    # As a query's plan has it: the question after everything else.
    at[-min(case.rows, 32) :] = torch.arange(case.keys - min(case.rows, 32), case.keys, device=day.device)
    at = (
        at.unique()
        if len(at.unique()) == len(at)
        else torch.arange(case.keys - case.rows, case.keys, device=day.device)
    )
    return query.to(dtype), sides[0, :, :, : case.keys].to(dtype), sides[1, :, :, : case.keys].to(dtype), at


def _right(day: Day, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    query, key, value, at = _made(day, case, dtype)
    exact = _by_formula(query, key, value, at)
    found: dict[str, Any] = {}
    for backend in (sdpa, triton_rows):
        name = backend.name
        try:
            out = backend.attend(query, key, value, AttentionParams(0.2), KeyRanges(at.tolist(), at))
            found[name] = float((out.double() - exact).norm() / exact.norm())
        except Exception as error:  # one that fails says so; the others are measured all the same
            if "CUDA error" in str(error):
                raise
            found[name] = f"{type(error).__name__}: {error}"[:300]
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    if not all(isinstance(value, float) and value < limit for value in found.values()):
        raise AssertionError(f"{found}")
    return found


def _by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    query, key, value = (side.double() for side in (query, key, value))
    key, value = (side.repeat_interleave(query.shape[1] // side.shape[1], 1) for side in (key, value))
    scores = query @ key.transpose(-1, -2) * 0.2
    hidden = torch.arange(key.shape[2], device=at.device) > at[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def _fast(day: Day, case: Case) -> dict[str, Any]:
    """Milliseconds, and TFLOP/s of what rows really see; Triton also with other tiles."""
    query, key, value, at = _made(day, case, torch.bfloat16)
    flops = 4 * case.heads * case.head_dim * int((at + 1).sum())
    params, ranges = AttentionParams(0.1), KeyRanges(at.tolist(), at)
    ways: dict[str, Callable[[], object]] = {
        "sdpa": lambda: sdpa.attend(query, key, value, params, ranges),
        "triton": lambda: triton_rows.attend(query, key, value, params, ranges),
    }
    if case.rows == case.keys:
        grouped = case.heads != case.kv_heads
        attend = torch.nn.functional.scaled_dot_product_attention
        ways["causal, dense"] = lambda: attend(query, key, value, is_causal=True, enable_gqa=grouped)
    if case.rows > 1000:
        for tile in _TILES:
            ways[f"triton {tile.rows}x{tile.keys}, {tile.warps} warps"] = partial(
                triton_rows.attend, query, key, value, params, ranges, tile
            )
    found: dict[str, Any] = {}
    for name, work in ways.items():
        try:
            ms = milliseconds(work, day.device, 5)
            found[name] = {"ms": round(ms, 3), "tflop_per_s": round(flops / ms / 1e9, 1)}
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found
