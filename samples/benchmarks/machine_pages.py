"""The pages and the figure of `machines.py`, from its files of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("full", "union", "epic", "reuse")
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


# ---- the table by machine ----


def machines_page(machines: Sequence[Machine]) -> str:
    """The table of each machine."""
    return "\n".join(_machines_lines(machines)) + "\n"


def _machines_lines(machines: Sequence[Machine]) -> Iterator[str]:
    yield "# Machines"
    yield ""
    yield (
        "How soon the first token is there and how fast the others follow, machine by machine, compared with llama.cpp "
        "on the same GGUF file. Seconds to the first token; after a mode's time its efficiency: its speedup over the "
        "quicker "
        "full prefill of kvtool and `transformers`, over the ratio of FLOPs. llama.cpp: the best of its settings, each "
        "number separately; *saved*: its saved prompt state loaded, then the question. What every number includes: "
        "[peers](peers.md)."
    )
    yield ""
    yield "![Time to the first token by the length of the prompt](machines.svg)"
    for machine in machines:
        yield from _machine_lines(machine)


def _machine_lines(machine: Machine) -> Iterator[str]:
    yield from ("", f"## {machine.title}", "")
    yield (
        "| prompt | full | union | epic | reuse | llama.cpp | its saved state | prefill, tokens/s: full · llama.cpp "
        "| decoding, tokens/s: kvtool · llama.cpp |"
    )
    yield "|" + " --- |" * 9
    for context in machine.contexts:
        llama, full = machine.llama(context), machine.mode(context, "full")
        modes = (_with_efficiency(machine.mode(context, mode)) for mode in MODES)
        cells = (
            f"{context:,}",
            *modes,
            f"{llama.ttft_ms / 1e3:.2f}",
            f"{llama.saved_ms / 1e3:.2f}",
            f"{full['prefill_tokens_per_second']:.0f} · {context / llama.ttft_ms * 1e3:.0f}",
            f"{_decoding(machine, context):.0f} · {llama.decoding:.0f}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _origin(machine)


def _with_efficiency(row: dict[str, Any]) -> str:
    return f"{row['ttft_ms'] / 1e3:.2f} ({row['efficiency']:.2f})"


def _decoding(machine: Machine, context: int) -> float:
    """Return the tokens a second after a prompt of the default mode; differences between modes are noise."""
    return float(machine.mode(context, "union")["decode_tokens_per_second"])


def _origin(machine: Machine) -> Iterator[str]:
    host, held = machine.bench["host"], machine.bench["host"]["held_to"]
    counts = sorted({row["count"] for row in machine.bench["rows"]})
    rounds = " to ".join(str(number) for number in dict.fromkeys((counts[0], counts[-1])))
    told = "one round" if rounds == "1" else f"medians of {rounds} rounds"
    yield f"- machine: {host['cpu']}, {' '.join(host['cpu_features'])}"
    yield f"- torch {host['torch']} with its {host['torch_kernels']} kernels"
    if held:
        yield f"- held back by {' '.join(f'{name}={value!r}' for name, value in held.items())}"
    for kind, version, build in dict.fromkeys(
        (who["kind"], who["version"], who["build"]) for who in machine.bench["contenders"]
    ):
        yield f"- {kind} {version}: {_plainly(build)}"
    if machine.share < QUIET:
        yield f"- **not quiet**: others had the cores, too; llama.cpp's prefill got {machine.share:.0%} of them"
    flag = " --as avx2" if held else ""
    yield f"- date: {machine.date} · commit: {machine.commit} · {told}"
    yield f"- command: `python samples/benchmarks/machines.py measure {machine.name}{flag}`"


def _plainly(build: str) -> str:
    """llama.cpp's own list of what is built in, without the `= 1` of each."""
    if " = 1" not in build:
        return build
    kind, _, features = build.partition(":")
    names = ", ".join(each.split()[0] for each in features.split("|") if " = 1" in each)
    return f"built for {kind.strip()} with {names}"


def figure(machines: Sequence[Machine]) -> str:
    """A panel a machine."""
    from kvtool.reports.charts import line_charts

    panels = [_panel(machine) for machine in machines]
    note = "SmolLM2-135M (Q4_1); llama.cpp: the quickest of its settings"
    return line_charts("Time to the first token, seconds", panels, "prompt, tokens", note, "logarithmic")


def _panel(machine: Machine) -> Any:
    from kvtool.reports.charts import Line, Panel

    lines = {
        "kvtool full": lambda context: machine.mode(context, "full")["ttft_ms"],
        "kvtool union": lambda context: machine.mode(context, "union")["ttft_ms"],
        "kvtool reuse": lambda context: machine.mode(context, "reuse")["ttft_ms"],
        "llama.cpp": lambda context: machine.llama(context).ttft_ms,
        "llama.cpp, saved state": lambda context: machine.llama(context).saved_ms,
    }
    drawn = (
        Line(name, tuple((float(context), value(context) / 1e3) for context in machine.contexts))
        for name, value in lines.items()
    )
    return Panel(machine.title, tuple(drawn), logarithmic=True)


# ---- what is won and what is lost ----


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


# Why kvtool is slower, where it is: the words are written here once, the numbers come from the measurements.
REASONS = {
    "first token, full prefill": (
        "Prefill is one product after another in float32 or bfloat16; llama.cpp multiplies the file's 4-bit weights in "
        "integers, which moves fewer bytes and pays on a CPU whose float32 products are slow."
    ),
    "first token, union against full prefill": (
        "Choosing and computing scattered rows costs more than it saves on so short a prompt."
    ),
    "first token, reuse against a saved state": (
        "A saved state is one sequential read of rows at unchanged positions; kvtool reads, checks and rotates "
        "chunk by chunk, because any chunk may be at any position. A saved state serves one list of documents in one "
        "order."
    ),
    "decoding": (
        "Both read the file's packed weights once a token. kvtool multiplies them with float32 numbers, which keeps "
        "the model's answers; llama.cpp rounds the row to 8-bit integers first and needs fewer instructions a weight."
    ),
    "ready: libraries and model": (
        "Importing torch and transformers takes most of it; llama.cpp is one library, and maps the file. A session, a "
        "batch or the Python API pays it once."
    ),
    "memory at the peak": (
        "torch and transformers are resident before any weight is; the prompt's records stay mapped in addition to its "
        "own keys and values, and a prefill unpacks a layer at a time."
    ),
    "stored, exact": "A number is kept as the model computes it: in float32, twice llama.cpp's float16 before coding.",
}


def compared(machine: Machine, context: int) -> list[Compared]:
    """Every quantity at one context."""
    llama, full = machine.llama(context), machine.mode(context, "full")
    union, reuse = machine.mode(context, "union"), machine.mode(context, "reuse")
    stored = {row["level"]: row["bytes_per_token"] for row in machine.bench["stored"]}
    rows = [
        Compared("first token, full prefill", full["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token, union against full prefill", union["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token, reuse against a saved state", reuse["ttft_ms"], llama.saved_ms, "ms"),
        Compared("decoding", _decoding(machine, context), llama.decoding, "tokens/s", more=True),
        Compared("ready: libraries and model", ready_ms(union), llama.ready_ms, "ms"),
        Compared("stored, exact", stored["lossless"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
        Compared("stored, level 2", stored["2"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
    ]
    if union["peak_bytes"] and llama.peak_bytes:
        rows.append(Compared("memory at the peak", union["peak_bytes"] / 1e6, llama.peak_bytes / 1e6, "MB"))
    return rows


def peers_page(machines: Sequence[Machine]) -> str:
    """Return the page of what kvtool wins and loses."""
    return "\n".join(_peers_lines(machines)) + "\n"


def _peers_lines(machines: Sequence[Machine]) -> Iterator[str]:
    yield "# Compared with other systems"
    yield ""
    yield (
        "kvtool, llama.cpp and plain `transformers` on the same GGUF file (SmolLM2-135M-Instruct, Q4_1), the same "
        "token ids, the same cores, in one run: every contender in a process of its own, in turn. llama.cpp is "
        "measured as it comes and with the quickest of its settings, with and without flash attention; of every "
        "quantity its best counts. Every loss of kvtool is listed below with its reason. By machine and "
        "length, with the figure: [machines](machines.md)."
    )
    for machine in machines:
        yield from ("", f"## {machine.title}", "")
        yield f"| kvtool · llama.cpp (how many times better) | {_heads(machine)} |"
        yield "|" + " --- |" * (1 + len(machine.contexts))
        for line in zip(*(compared(machine, context) for context in machine.contexts), strict=True):
            yield f"| {line[0].what}, {line[0].unit} | {' | '.join(one.cell for one in line)} |"
        yield ""
        yield from _beside_transformers(machine)
        yield ""
        yield from _origin(machine)
    yield from _losses(machines)
    yield from ("", "## What the numbers include", "")
    yield from (f"- {sentence.rstrip('.')}." for sentence in machines[0].bench["includes"].split(". "))


def _heads(machine: Machine) -> str:
    return " | ".join(f"{context:,} tokens" for context in machine.contexts)


def _beside_transformers(machine: Machine) -> Iterator[str]:
    yield "| kvtool · plain `transformers` | full prefill, s | decoding, tokens/s | ready, s | peak, MB |"
    yield "| --- | --- | --- | --- | --- |"
    for context in machine.contexts:
        (plain,) = machine.rows(context, "transformers")
        full = machine.mode(context, "full")
        peaks = " · ".join(_megabytes(row["peak_bytes"]) for row in (full, plain))
        yield (
            f"| {context:,} tokens | {full['ttft_ms'] / 1e3:.2f} · {plain['ttft_ms'] / 1e3:.2f} "
            f"| {full['decode_tokens_per_second']:.0f} · {plain['decode_tokens_per_second']:.0f} "
            f"| {ready_ms(full) / 1e3:.1f} · {ready_ms(plain) / 1e3:.1f} | {peaks} |"
        )


def _megabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e6:.0f}"


def _losses(machines: Sequence[Machine]) -> Iterator[str]:
    """Yield each quantity in which kvtool loses on some machine, where it is worst, and why."""
    behind: dict[str, list[tuple[float, Machine, int]]] = {}
    for machine in machines:
        for context in machine.contexts:
            for one in compared(machine, context):
                if one.ahead < 1:
                    behind.setdefault(one.what, []).append((one.ahead, machine, context))
    yield from ("", "## What kvtool loses, and why", "")
    if not behind:
        yield "Nothing of what is measured here."
    for what, places in behind.items():
        worst, machine, context = min(places, key=lambda place: place[0])
        told = REASONS.get(what, "")
        yield (
            f"- **{what}**: worse in {len(places)} of {sum(len(one.contexts) for one in machines)} cases, at worst "
            f"{1 / worst:.2g}x ({context:,} tokens, {machine.title}). {told}"
        )
