"""Options of the benches."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.codec.levels import LEVELS, NAMES
from kvtool.core.fusion.selectors import MODES, REFERENCE
from kvtool.core.options.option import Options, option

MEASURED = "Measurement"  # heading in the commands' help


def _repeat(rounds: int) -> int:
    return option(rounds, "Number of rounds; medians are shown.", group=MEASURED, setting=False, lowest=1)


@dataclass(frozen=True, kw_only=True)
class IngestBenchOptions(Options, settings=False):
    """Options of how much is ingested again."""

    tokens: int = option(8192, "Number of stored tokens to prefill again.", group=MEASURED, lowest=1)
    repeat: int = _repeat(3)


@dataclass(frozen=True, kw_only=True)
class CodecBenchOptions(Options, settings=False, group=MEASURED):
    """Options of how much is encoded and decoded, and by what."""

    tokens: int = option(8192, "Number of stored tokens to encode and decode.", lowest=1)
    repeat: int = _repeat(3)
    threads: int | None = option(
        None, "Threads of the second measurement; the first uses one.", lowest=1, instead="one a core"
    )
    coder: str | None = option(None, "Entropy coder.", metavar="avx512|avx2|neon|scalar|numpy", instead="the best")


@dataclass(frozen=True, kw_only=True)
class FusionBenchOptions(Options, settings=False, group=MEASURED):
    """Options of the modes and prompts to measure."""

    shape: str | None = option(None, "Use random weights of this model's size, not the store's model.", metavar="NAME")
    context: tuple[int, ...] = option(
        (2048,), "Length of the whole prompt, in tokens.", metavar="N,N", lowest=1, instead="2048"
    )
    fusion: tuple[str, ...] = option(
        tuple(mode for mode in MODES if mode != REFERENCE),
        "Fusion modes to measure.",
        choices=MODES,
        metavar="a,b,c",
        instead="all but full",
    )
    question_tokens: int = option(32, "Length of the question, in tokens.", lowest=1)
    level: str = option("raw", "Compression level to read.", choices=LEVELS, metavar=NAMES)
    skip_full_above: int | None = option(
        None,
        "Skip full prefill of longer prompts.",
        metavar="TOKENS",
        lowest=0,
        instead="none",
    )
    repeat: int = _repeat(5)


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions(Options, settings=False, group=MEASURED):
    """Options of what is decoded after which prompt, and how."""

    shape: str | None = option(None, "Use random weights of this model's size.", metavar="NAME")
    context: int = option(1024, "Length of the prompt, in tokens.", lowest=1)
    new_tokens: int = option(64, "Number of tokens to decode.", lowest=1)
    stepper: tuple[str, ...] = option(
        ("native", "torch"),
        "Ways to decode: machine code (native) or PyTorch (torch).",
        choices=("native", "torch"),
        metavar="a,b",
        instead="both",
    )
    threads: int | None = option(None, "Number of threads.", lowest=1, instead="torch's own")
