"""The fusion bench for people: a table, what its numbers mean, a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvtool.lab.bench.fusion import FusionBench
from kvtool.lab.bench.rows import FusionRow
from kvtool.lab.charts.svg import Line, Panel, line_charts

TABLE_HEAD = (
    "fusion",
    "context",
    "TTFT ms",
    "speedup",
    "FLOPs ratio",
    "efficiency",
    "read",
    "decode",
    "load",
    "wait",
    "select",
    "compute",
    "overlap",
    "MB read",
    "limit ms",
    "of limit",
    "peak MB",
    "staged",
)
_MEANING = (
    "speedup: full prefill / TTFT; FLOPs ratio: full / this mode; efficiency: speedup / FLOPs ratio. Milliseconds: "
    "load = read + decode + upload + rotate, in a thread beside compute (selection included); wait: for it; overlap: "
    "TTFT / the larger of load and compute. limit: by layer the slower of its FLOPs and its weights, or all bytes "
    "read, at the speeds above; peak: memory on top of the model, measured in a pass that is not timed; staged: what "
    "a pass that has nothing to load takes less of it (the KV of one layer: {layer_mb:.1f} MB)"
)


def fusion_table(result: FusionBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `TABLE_HEAD`; full prefill by both before each context's modes."""
    for reference in result.references:
        both = (("full, transformers", reference.transformers_ms), ("full, kvtool", reference.kvtool_ms))
        for name, milliseconds in both:
            if milliseconds is None or reference.ms is None:
                continue
            speedup = f"{reference.ms / milliseconds:.2f}"
            yield (name, reference.context, f"{milliseconds:.1f}", speedup, "1.00", speedup, *[""] * 12)
        for row in result.rows:
            if row.context == reference.context:
                yield _cells(row)


def _cells(row: FusionRow) -> tuple[Any, ...]:
    return (
        row.fusion,
        row.context,
        f"{row.ttft_ms:.1f}",
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        f"{row.flops_ratio:.2f}",
        "-" if row.efficiency is None else f"{row.efficiency:.2f}",
        f"{row.read_ms:.1f}",
        f"{row.decode_ms:.1f}",
        f"{row.load_ms:.1f}",
        f"{row.wait_ms:.1f}",
        f"{row.select_ms:.1f}",
        f"{row.compute_ms:.1f}",
        f"{row.overlap:.2f}",
        f"{row.bytes_read / 1e6:.1f}",
        f"{row.limit_ms:.1f}",
        f"{row.roofline_efficiency:.0%}",
        *("-" if size is None else f"{size / 1e6:.0f}" for size in (row.peak_memory_bytes, row.staging_bytes)),
    )


def fusion_notes(result: FusionBench) -> Iterator[str]:
    """What was measured, on what, and what the numbers mean."""
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
            f"{reference.context} tokens: {reference.chunks} chunks and a question of {reference.question_tokens}; "
            f"full prefill is {full}"
        )
    upload = f", upload {machine.upload_bytes_per_s / 1e9:.1f} GB/s" if machine.upload_bytes_per_s else ""
    yield (
        f"its limits: products in {result.dtype} {machine.gemm_flop_per_s / 1e12:.3f} TFLOP/s, weights read at "
        f"{machine.weights_bytes_per_s / 1e9:.1f} GB/s, memcpy {machine.memcpy_bytes_per_s / 1e9:.1f} GB/s{upload}"
    )
    yield _MEANING.format(layer_mb=max(row.layer_bytes for row in result.rows) / 1e6)
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
    return line_charts(f"kvtool bench fusion: {result.model}", panels, "context, tokens", note)


def _points(
    result: FusionBench, mode: str, value: Callable[[FusionRow], float | None]
) -> tuple[tuple[float, float], ...]:
    rows = sorted((row for row in result.rows if row.fusion == mode), key=lambda row: row.context)
    found = ((float(row.context), value(row)) for row in rows)
    return tuple((context, number) for context, number in found if number is not None)
