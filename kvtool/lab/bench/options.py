"""What can be set of the benches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.codec.levels import LEVELS, NAMES
from kvtool.core.fusion.selectors import MODES, REFERENCE
from kvtool.core.options.option import Options, option
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR, PREDICTORS
from kvtool.core.streaming.policy import DEPTH
from kvtool.lab.bench.peers.task import PEERS

MEASURED, LINK, DRAWN = "What is measured", "Link and machine", "Files"  # headings in the commands' help


def _repeat(rounds: int) -> int:
    return option(rounds, "Rounds; medians are shown.", group=MEASURED, setting=False, lowest=1)


@dataclass(frozen=True, kw_only=True)
class IngestBenchOptions(Options, settings=False):
    """How much is ingested again."""

    tokens: int = option(8192, "How much of the store to prefill again.", group=MEASURED, lowest=1)
    repeat: int = _repeat(3)


@dataclass(frozen=True, kw_only=True)
class CodecBenchOptions(Options, settings=False, group=MEASURED):
    """How much is encoded and decoded, and by what."""

    tokens: int = option(8192, "How much of the store to encode and decode.", lowest=1)
    repeat: int = _repeat(3)
    threads: int | None = option(None, "Beside one thread.", lowest=1, instead="one a core")
    coder: str | None = option(None, "Entropy coder.", metavar="avx512|avx2|neon|scalar|numpy", instead="the best")


@dataclass(frozen=True, kw_only=True)
class FusionBenchOptions(Options, settings=False):
    """Which modes answer which prompts."""

    shape: str | None = option(
        None, "Random weights of this model's size, instead of the store's.", group=MEASURED, metavar="NAME"
    )
    context: tuple[int, ...] = option(
        (2048,), "Tokens of the whole prompt.", group=MEASURED, metavar="N,N", lowest=1, instead="2048"
    )
    fusion: tuple[str, ...] = option(
        tuple(mode for mode in MODES if mode != REFERENCE),
        "Modes.",
        group=MEASURED,
        choices=MODES,
        metavar="a,b,c",
        instead="all but full",
    )
    question_tokens: int = option(32, "Length of the question.", group=MEASURED, lowest=1)
    level: str = option("raw", "Codec level that is read.", group=MEASURED, choices=LEVELS, metavar=NAMES)
    skip_full_above: int | None = option(
        None,
        "Longer prompts are not prefilled in full.",
        group=MEASURED,
        metavar="TOKENS",
        lowest=0,
        instead="all are",
    )
    paired: bool = option(
        False, "Time modes that shift reused rows without it too, in turn: what it costs.", group=MEASURED
    )
    repeat: int = _repeat(5)
    plot: Path | None = option(None, "Draw the result.", group=DRAWN, metavar="FILE.svg", unit="path")


@dataclass(frozen=True, kw_only=True)
class PeersBenchOptions(Options, settings=False):
    """Who answers which prompts."""

    peers: tuple[str, ...] = option(
        PEERS, "Beside kvtool.", group=MEASURED, choices=PEERS, metavar="a,b", instead=",".join(PEERS)
    )
    fusion: tuple[str, ...] = option(
        ("full", "union", "epic", "reuse"),
        "Modes of kvtool.",
        group=MEASURED,
        choices=MODES,
        metavar="a,b,c",
        instead="full,union,epic,reuse",
    )
    context: tuple[int, ...] = option(
        (1000,), "Tokens of the whole prompt.", group=MEASURED, metavar="N,N", lowest=1, instead="1000"
    )
    question_tokens: int = option(32, "Length of the question.", group=MEASURED, lowest=1)
    new_tokens: int = option(64, "Tokens decoded behind the first.", group=MEASURED, lowest=1)
    level: str = option("raw", "Codec level that is read.", group=MEASURED, choices=LEVELS, metavar=NAMES)
    repeat: int = _repeat(3)
    threads: int | None = option(None, "Of everybody's arithmetic.", group=MEASURED, lowest=1, instead="one a core")
    resume: Path | None = option(
        None, "Keep results here and go on from them.", group=DRAWN, metavar="FILE.jsonl", unit="path"
    )
    plot: Path | None = option(None, "Draw the result.", group=DRAWN, metavar="FILE.svg", unit="path")


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions(Options, settings=False, group=MEASURED):
    """What is decoded behind which prompt, and how."""

    shape: str | None = option(None, "Random weights of this model's size.", metavar="NAME")
    context: int = option(1024, "Tokens of the prompt.", lowest=1)
    new_tokens: int = option(64, "Tokens decoded behind it.", lowest=1)
    stepper: tuple[str, ...] = option(
        ("native", "torch"), "Ways to decode.", choices=("native", "torch"), metavar="a,b", instead="both"
    )
    together: tuple[int, ...] = option((), "Sequences decoded at once, beside one alone.", metavar="N,N", lowest=1)
    threads: int | None = option(None, "Of all arithmetic.", lowest=1, instead="torch's own")


@dataclass(frozen=True, kw_only=True)
class StreamBenchOptions(Options, settings=False):
    """Which policies meet which objectives over which links."""

    shape: str | None = option(None, "KV of this model's size, instead of the store's.", group=MEASURED, metavar="NAME")
    slo_ms: tuple[float, ...] = option(
        (300.0, 500.0, 1000.0, 2000.0),
        "Objectives.",
        group=MEASURED,
        metavar="MS,MS",
        lowest=1,
        instead="300,500,1000,2000",
    )
    context: int = option(10_000, "Tokens of all chunks.", group=MEASURED, lowest=1)
    chunk_tokens: int = option(1500, "Tokens of a chunk, with --shape.", group=MEASURED, lowest=1)
    levels: Path | None = option(
        None,
        "With --shape: bits and losses by level, as `inspect codec --json` gives them.",
        group=MEASURED,
        metavar="FILE.json",
        unit="path",
        instead="those of a small model",
    )
    trace: tuple[Path, ...] = option(
        (), "Bandwidth over time.", group=LINK, metavar="FILE", unit="path", instead="generated ones"
    )
    predictor: str = option(DEFAULT_PREDICTOR, "How the bandwidth is predicted.", group=LINK, choices=PREDICTORS)
    margin: float = option(
        DEFAULT_MARGIN, "Share of the prediction not counted on.", group=LINK, unit="percentage", lowest=0, highest=0.99
    )
    depth: int = option(DEPTH, "Requests outstanding at once.", group=LINK, lowest=1)
    gpu: str = option("a100", "What computes, with --shape.", group=LINK, metavar="a100|a40", suggest=("a100", "a40"))
    prefill_tokens_per_second: float | None = option(
        None, "How fast it prefills.", group=LINK, lowest=1e-9, instead="of the GPU, or measured"
    )
    decode_gb_per_s: float | None = option(None, "GB/s of decoded KV.", group=LINK, lowest=1e-9, instead="not counted")
    write_traces: Path | None = option(
        None, "Write the generated traces there.", group=DRAWN, metavar="FOLDER", unit="path"
    )
    plot: Path | None = option(
        None, "Draw it; also FILE-classes.svg, FILE-drop.svg.", group=DRAWN, metavar="FILE.svg", unit="path"
    )
