"""Options of the benches."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.codec.levels import LEVELS, NAMES
from kvtool.core.fusion.selectors import MODES, REFERENCE
from kvtool.core.options.option import Options, option

MEASURED = "What is measured"  # heading in the commands' help


def _repeat(rounds: int) -> int:
    return option(rounds, "Rounds; medians are shown.", group=MEASURED, setting=False, lowest=1)


@dataclass(frozen=True, kw_only=True)
class IngestBenchOptions(Options, settings=False):
    """Options of how much is ingested again."""

    tokens: int = option(8192, "How much of the store to prefill again.", group=MEASURED, lowest=1)
    repeat: int = _repeat(3)


@dataclass(frozen=True, kw_only=True)
class CodecBenchOptions(Options, settings=False, group=MEASURED):
    """Options of how much is encoded and decoded, and by what."""

    tokens: int = option(8192, "How much of the store to encode and decode.", lowest=1)
    repeat: int = _repeat(3)
    threads: int | None = option(None, "Threads, in addition to one thread.", lowest=1, instead="one a core")
    coder: str | None = option(None, "Entropy coder.", metavar="avx512|avx2|neon|scalar|numpy", instead="the best")


@dataclass(frozen=True, kw_only=True)
class FusionBenchOptions(Options, settings=False, group=MEASURED):
    """Options of the modes and prompts to measure."""

    shape: str | None = option(None, "Random weights of this model's size, instead of the store's.", metavar="NAME")
    context: tuple[int, ...] = option((2048,), "Tokens of the whole prompt.", metavar="N,N", lowest=1, instead="2048")
    fusion: tuple[str, ...] = option(
        tuple(mode for mode in MODES if mode != REFERENCE),
        "Modes.",
        choices=MODES,
        metavar="a,b,c",
        instead="all but full",
    )
    question_tokens: int = option(32, "Length of the question.", lowest=1)
    level: str = option("raw", "Codec level that is read.", choices=LEVELS, metavar=NAMES)
    skip_full_above: int | None = option(
        None,
        "Longer prompts are not prefilled in full.",
        metavar="TOKENS",
        lowest=0,
        instead="all are",
    )
    repeat: int = _repeat(5)


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions(Options, settings=False, group=MEASURED):
    """Options of what is decoded after which prompt, and how."""

    shape: str | None = option(None, "Random weights of this model's size.", metavar="NAME")
    context: int = option(1024, "Tokens of the prompt.", lowest=1)
    new_tokens: int = option(64, "Tokens decoded after it.", lowest=1)
    stepper: tuple[str, ...] = option(
        ("native", "torch"), "Ways to decode.", choices=("native", "torch"), metavar="a,b", instead="both"
    )
    threads: int | None = option(None, "Of all arithmetic.", lowest=1, instead="torch's own")
