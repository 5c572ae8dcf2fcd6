"""The bench of peers for people: tables, what their numbers mean, a chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtool.lab.bench.machine import Host
from kvtool.lab.bench.peers.rows import PeerRow, PeersBench
from kvtool.lab.bench.peers.task import KVTOOL, LLAMA
from kvtool.lab.charts.svg import Line, Panel, line_charts

TABLE_HEAD = (
    "who",
    "context",
    "TTFT s",
    "prefill tok/s",
    "decode tok/s",
    "speedup",
    "efficiency",
    "ready s",
    "libraries MB",
    "model MB",
    "peak MB",
    "mapped",
    "rounds",
)
STORED_HEAD = ("stored", "KB a token")
_SAVED = "{}: from its saved state"
_MEANING = (
    "speedup: the quickest llama.cpp without a saved state / this one; efficiency: (the quicker full prefill of "
    "transformers and kvtool / this mode) / (full FLOPs / this mode's); ready: libraries imported and the model "
    "loaded, files in the page cache"
)


def peers_table(result: PeersBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `TABLE_HEAD`; what a saved state gives stands below its contender."""
    for row in result.rows:
        yield _cells(row)
        if row.saved:
            faster = "" if row.speedup is None else f"{row.speedup * row.ttft_ms / row.saved['ttft_ms']:.2f}"
            label = _SAVED.format(row.contender)
            yield (label, row.context, f"{row.saved['ttft_ms'] / 1e3:.3f}", "", "", faster, *[""] * 7)


def _cells(row: PeerRow) -> tuple[Any, ...]:
    return (
        row.contender,
        row.context,
        f"{row.ttft_ms / 1e3:.3f}",
        f"{row.prefill_tokens_per_second:.0f}",
        f"{row.decode_tokens_per_second:.1f}",
        "" if row.speedup is None else f"{row.speedup:.2f}",
        "" if row.efficiency is None else f"{row.efficiency:.2f}",
        f"{(row.import_ms + row.model_load_ms) / 1e3:.2f}",
        *(_megabytes(size) for size in (row.base_bytes, row.loaded_bytes, row.peak_bytes, row.mapped_bytes)),
        row.count,
    )


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.0f}"


def stored_table(result: PeersBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `STORED_HEAD`: every level, and llama.cpp's file."""
    for row in result.stored:
        yield f"{KVTOOL} {row['level']}", f"{row['bytes_per_token'] / 1e3:.2f}"
    saved = [row.saved for row in result.rows if row.saved]
    if saved:
        yield f"{LLAMA}, saved state", f"{max(saved, key=lambda one: one['tokens'])['bytes_per_token'] / 1e3:.2f}"


def peers_notes(result: PeersBench) -> Iterator[str]:
    """What was measured, on what, and what the numbers mean."""
    yield (
        f"{result.model} in {result.dtype}, {result.threads} threads on {result.cores} cores; level {result.level}, "
        f"chunks of {result.chunk_tokens}, a question of {result.question_tokens}, {result.new_tokens} tokens decoded; "
        f"ratio {result.ratio:g}, {result.link_tokens} link tokens; medians of the rounds"
    )
    yield Host(**result.host).line()
    for kind, version, build in dict.fromkeys((who.kind, who.version, who.build) for who in result.contenders):
        yield f"{kind} {version}: {build}"
    yield _MEANING
    yield from result.includes.split(". ")


def peers_chart(result: PeersBench) -> str:
    """Time to the first token by the prompt's length, as an SVG document."""
    lines: dict[str, dict[int, float]] = {}
    for row in result.rows:
        name = LLAMA if row.kind == LLAMA else row.contender
        points = lines.setdefault(name, {})
        points[row.context] = min(points.get(row.context, row.ttft_ms), row.ttft_ms)
        if row.saved:
            saved = lines.setdefault(f"{LLAMA}, saved state", {})
            saved[row.context] = min(saved.get(row.context, row.saved["ttft_ms"]), row.saved["ttft_ms"])
    drawn = [
        Line(name, tuple((float(context), milliseconds / 1e3) for context, milliseconds in sorted(points.items())))
        for name, points in lines.items()
    ]
    panel = Panel("TTFT, seconds", tuple(drawn), logarithmic=True)
    note = f"{result.model}, {result.dtype}, {result.threads} threads; llama.cpp: the quickest of its settings"
    return line_charts("kvtool bench peers: time to the first token", [panel], "prompt, tokens", note, "logarithmic")
