"""The fusion bench for people: a table, what its numbers mean, a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.lab.bench.fusion import FusionBench, FusionRow
from kvtool.lab.charts.svg import Line, Panel, line_charts

_MEANING = (
    "speedup: full prefill / TTFT; FLOPs: those of full / of this mode; efficiency: speedup / FLOPs. Milliseconds: "
    "load = read + decode + upload + rotate, in a thread beside compute (selection included); wait: for it; overlap: "
    "TTFT / the larger of load and compute. limit: by layer the slower of its FLOPs and its weights, or all bytes "
    "read, at the speeds above"
)


@dataclass(frozen=True, slots=True)
class FusionTable:
    """A part of the figures that fits a terminal of 80 columns; all of them are in the JSON."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def fusion_tables(result: FusionBench) -> tuple[FusionTable, ...]:
    """Make the tables of each mode's speed, of its time by part, and of its bytes and limits."""
    head = ("fusion", "context")
    speed = (*head, "TTFT ms", "speedup", "FLOPs", "efficiency", "of limit")
    times = (*head, "read", "decode", "load", "wait", "select", "shift", "compute")
    sizes = (*head, "overlap", "limit ms", "MB read")
    return (
        FusionTable("time to the first token", speed, tuple(_speeds(result))),
        FusionTable("milliseconds by part", times, tuple(map(_times, result.rows))),
        FusionTable("limits", sizes, tuple(map(_sizes, result.rows))),
    )


def _speeds(result: FusionBench) -> Iterator[tuple[Any, ...]]:
    """Full prefill by both before each context's modes."""
    for reference in result.references:
        for name, milliseconds in (
            ("transformers", reference.transformers_ms),
            ("full, kvtool", reference.kvtool_ms),
        ):
            if milliseconds is not None and reference.ms is not None:
                speedup = f"{reference.ms / milliseconds:.2f}"
                yield (name, reference.context, _ms(milliseconds), speedup, "1.00", speedup, "")
        yield from (_speed(row) for row in result.rows if row.context == reference.context)


def _speed(row: FusionRow) -> tuple[Any, ...]:
    return (
        row.fusion,
        row.context,
        _ms(row.ttft_ms),
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        f"{row.flops_ratio:.2f}",
        "-" if row.efficiency is None else f"{row.efficiency:.2f}",
        f"{row.roofline_efficiency:.0%}",
    )


def _times(row: FusionRow) -> tuple[Any, ...]:
    parts = (row.read_ms, row.decode_ms, row.load_ms, row.wait_ms, row.select_ms, row.shift_ms, row.compute_ms)
    return (row.fusion, row.context, *map(_ms, parts))


def _sizes(row: FusionRow) -> tuple[Any, ...]:
    return (row.fusion, row.context, f"{row.overlap:.2f}", _ms(row.limit_ms), f"{row.bytes_read / 1e6:.1f}")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 1e3 else f"{milliseconds:.0f}"


def fusion_notes(result: FusionBench) -> Iterator[str]:
    """Describe the measurement, its machine, and the meaning of the numbers."""
    machine = result.machine
    weights = "random weights" if result.shape else "its own weights"
    yield (
        f"{result.model} ({result.parameters / 1e6:.4g} M parameters, {weights}, {result.model_bytes / 1e6:.4g} MB) "
        f"on {result.device} in {result.dtype}; level {result.level}, ratio {result.ratio:g}, "
        f"{result.link_tokens} link tokens; medians of {result.repeat} rounds"
    )
    yield result.host.line()
    for reference in result.references:
        full = "not measured" if reference.ms is None else f"{reference.name}, {reference.ms:.1f} ms"
        yield (
            f"{reference.context} tokens: {counted(reference.chunks, 'chunk')} and a question of "
            f"{reference.question_tokens}; full prefill is {full}"
        )
    upload = f", upload {machine.upload_bytes_per_s / 1e9:.1f} GB/s" if machine.upload_bytes_per_s else ""
    yield (
        f"its limits: products in {result.dtype} {machine.gemm_flop_per_s / 1e12:.3f} TFLOP/s, weights read at "
        f"{machine.weights_bytes_per_s / 1e9:.1f} GB/s, memcpy {machine.memcpy_bytes_per_s / 1e9:.1f} GB/s{upload}"
    )
    yield _MEANING
    yield f"TTFT: {result.includes}"
    yield f"full, transformers: {result.plain_includes}"


def fusion_chart(result: FusionBench) -> str:
    """Speedup and time to the first token by context, as an SVG document."""
    modes = list(dict.fromkeys(row.fusion for row in result.rows))
    references = sorted(result.references, key=lambda one: one.context)
    full = tuple((float(one.context), one.ms) for one in references if one.ms is not None)
    speedups = [Line("full prefill", tuple((context, 1.0) for context, _ in full))]
    times = [Line("full prefill", full)]
    for mode in modes:
        speedups.append(Line(mode, _points(result, mode, lambda row: row.speedup)))
        times.append(Line(mode, _points(result, mode, lambda row: row.ttft_ms)))
    note = (
        f"{result.device}, {result.dtype}, {result.threads} threads, level {result.level}, ratio {result.ratio:g}; "
        f"medians of {result.repeat} rounds; full prefill: the faster of transformers sdpa and kvtool"
    )
    panels = [
        Panel("speedup over full prefill", tuple(speedups)),
        Panel("TTFT, ms", tuple(times), logarithmic=True),
    ]
    return line_charts(f"kvtool bench fusion: {result.model}", panels, "context, tokens", note, "logarithmic")


def _points(
    result: FusionBench, mode: str, value: Callable[[FusionRow], float | None]
) -> tuple[tuple[float, float], ...]:
    rows = sorted((row for row in result.rows if row.fusion == mode), key=lambda row: row.context)
    found = ((float(row.context), value(row)) for row in rows)
    return tuple((context, number) for context, number in found if number is not None)
