"""One table of all that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WIDEST = 160


def of(stages: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """Markdown: a heading a stage, a row a step; nested numbers as `name value` pairs."""
    lines = []
    for stage, title in about.items():
        if stage not in stages:
            continue
        steps = stages[stage]["steps"]
        state = "finished" if stages[stage].get("finished") else "not finished"
        lines += [f"## {stage}: {title} ({state})", "", "| step | result | s |", "| --- | --- | --- |"]
        for name, step in steps.items():
            result = _cell(_short(step["value"])) if "value" in step else f"**failed** {_cut(step.get('error', ''))}"
            lines.append(f"| {name} | {result} | {step.get('seconds', '')} |")
        lines.append("")
        lines += _fusion(steps) if stage == "fusion" else []
    return "\n".join(lines)


def _short(value: Any) -> Any:
    """Without what has a table of its own, or is the machine's."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name not in ("rows", "host", "machine")}


def _fusion(steps: Mapping[str, Any]) -> list[str]:
    """A row a mode."""
    names = (
        "ttft_ms",
        "cold_ms",
        "held_ms",
        "full_ms",
        "speedup",
        "efficiency",
        "roofline_efficiency",
        "overlap",
    )
    parts = (
        "read_ms",
        "decode_ms",
        "upload_ms",
        "rotate_ms",
        "select_ms",
        "compute_ms",
        "wait_ms",
        "peak_memory_bytes",
    )
    lines = ["| prompt | mode | " + " | ".join((*names, *parts)) + " |", "| --- " * (len(names) + len(parts) + 2) + "|"]
    for step, found in steps.items():
        for mode, row in (found.get("value") or {}).get("rows", {}).items():
            lines.append(
                f"| {step} | {mode} | " + " | ".join(_number(row.get(name)) for name in (*names, *parts)) + " |"
            )
    return [*lines, ""]


def _cell(value: Any) -> str:
    return _cut("; ".join(_pairs(value)) if isinstance(value, dict) else str(value))


def _pairs(value: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, one in value.items():
        if isinstance(one, dict):
            yield from _pairs(one, f"{before}{name} ")
        elif one not in ("", [], None):
            yield f"{before}{name} {_number(one)}"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) if value is not None else ""
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def _cut(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= _WIDEST * 3 else flat[: _WIDEST * 3] + " …"
