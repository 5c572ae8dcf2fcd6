"""The tables of `machines.py`, from its files of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUIET = 0.9  # share of the cores below which a page says that others had them, too


@dataclass(frozen=True)
class Machine:
    """A file of results."""

    name: str
    date: str
    commit: str
    bench: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Machine:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def title(self) -> str:
        """Return its name in tables."""
        host = self.bench["host"]
        held = ", held to AVX2" if host["held_to"] else ""
        cores = "1 core" if self.bench["threads"] == 1 else f"{self.bench['threads']} cores"
        return f"{host['cpu']}{held}, {cores}, {self.bench['resolved']['dtype']}"

    @property
    def contexts(self) -> list[int]:
        return sorted({row["context"] for row in self.bench["rows"]})

    def rows(self, context: int, kind: str, fusion: str = "") -> list[dict[str, Any]]:
        """The rows of one kind of contender."""
        return [
            row
            for row in self.bench["rows"]
            if (row["context"], row["kind"]) == (context, kind) and (not fusion or row["fusion"] == fusion)
        ]

    def mode(self, context: int, fusion: str) -> dict[str, Any]:
        (row,) = self.rows(context, "kvtool", fusion)
        return row

    @property
    def share(self) -> float:
        """Return the share of its cores that llama.cpp got during prefill; near 1, as its threads spin."""
        rows = [row for row in self.bench["rows"] if row["kind"] == "llama.cpp"]
        return min(row["ttft_cpu_ms"] / row["ttft_ms"] for row in rows) / int(self.bench["threads"])

    def llama(self, context: int) -> Llama:
        return Llama(self.rows(context, "llama.cpp"))


@dataclass(frozen=True)
class Llama:
    """llama.cpp at one context: of every quantity the best that one of its settings gave."""

    rows: list[dict[str, Any]]

    @property
    def ttft_ms(self) -> float:
        return float(min(row["ttft_ms"] for row in self.rows))

    @property
    def saved_ms(self) -> float:
        return float(min(row["saved"]["ttft_ms"] for row in self.rows))

    @property
    def saved_bytes_per_token(self) -> float:
        return float(min(row["saved"]["bytes_per_token"] for row in self.rows))

    @property
    def decoding(self) -> float:
        return float(max(row["decode_tokens_per_second"] for row in self.rows))

    @property
    def ready_ms(self) -> float:
        return float(min(ready_ms(row) for row in self.rows))

    @property
    def peak_bytes(self) -> int | None:
        return min((row["peak_bytes"] for row in self.rows if row["peak_bytes"]), default=None)


def ready_ms(row: dict[str, Any]) -> float:
    """Libraries and model."""
    return float(row["import_ms"] + row["model_load_ms"])


@dataclass(frozen=True)
class Compared:
    """One quantity of kvtool and of a peer; more is better where `more` says so."""

    what: str
    ours: float
    theirs: float
    unit: str
    more: bool = False

    @property
    def ahead(self) -> float:
        """Return how many times better kvtool is; below 1 it is worse."""
        return self.ours / self.theirs if self.more else self.theirs / self.ours

    @property
    def cell(self) -> str:
        """Both numbers and the factor, in bold where it is below 1."""
        factor = f"{self.ahead:.2g}x" if self.ahead >= 1 else f"**{self.ahead:.2f}x**"
        return f"{_number(self.ours)} · {_number(self.theirs)} ({factor})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compared(machine: Machine, context: int) -> list[Compared]:
    """Every quantity at one context."""
    llama, full = machine.llama(context), machine.mode(context, "full")
    (plain,) = machine.rows(context, "transformers")
    union, reuse = machine.mode(context, "union"), machine.mode(context, "reuse")
    stored = {row["level"]: row["bytes_per_token"] for row in machine.bench["stored"]}
    speed = "decode_tokens_per_second"
    rows = [
        Compared("first token: full prefill", full["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token: `union` against full prefill", union["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token: `reuse` against a saved state", reuse["ttft_ms"], llama.saved_ms, "ms"),
        Compared("decoding", union[speed], llama.decoding, "tokens/s", more=True),
        Compared("ready: libraries and model", ready_ms(union), llama.ready_ms, "ms"),
        Compared("stored, exact", stored["lossless"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
        Compared("stored, level 2", stored["2"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
    ]
    if union["peak_bytes"] and llama.peak_bytes:
        rows.append(Compared("peak memory", union["peak_bytes"] / 1e6, llama.peak_bytes / 1e6, "MB"))
    rows.append(Compared("`transformers`: full prefill", full["ttft_ms"], plain["ttft_ms"], "ms"))
    rows.append(Compared("`transformers`: decoding", union[speed], plain[speed], "tokens/s", more=True))
    return rows


def table(machine: Machine) -> Iterator[str]:
    """Yield a machine's heading, its table, and how it was measured."""
    yield from (f"### {machine.title}", "")
    heads = (f"{context:,} tokens" for context in machine.contexts)
    yield f"| kvtool · llama.cpp (how many times better) | {' | '.join(heads)} |"
    yield "|" + " --- |" * (1 + len(machine.contexts))
    for line in zip(*(compared(machine, context) for context in machine.contexts), strict=True):
        yield f"| {line[0].what}, {line[0].unit} | {' | '.join(one.cell for one in line)} |"
    yield from ("", *_origin(machine))


def _origin(machine: Machine) -> Iterator[str]:
    host = machine.bench["host"]
    counts = sorted({row["count"] for row in machine.bench["rows"]})
    versions = dict.fromkeys(f"{who['kind']} {who['version']}" for who in machine.bench["contenders"])
    yield f"- machine: {host['cpu']} ({' '.join(host['cpu_features'])}) · {' · '.join(versions)}"
    if machine.share < QUIET:
        yield f"- **not quiet**: others had the cores, too; llama.cpp's prefill got {machine.share:.0%} of them"
    yield f"- date: {machine.date} · commit: {machine.commit} · medians of {counts[0]} to {counts[-1]} rounds"
    flag = " --as avx2" if host["held_to"] else ""
    yield f"- command: `python samples/benchmarks/machines.py measure {machine.name}{flag}`"
