"""What a simulation starts from unless something else is given: sizes and losses of levels, links, speeds of GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.core.codec.levels import RAW
from kvtool.core.errors import UsageError
from kvtool.lab.bench.stream_traces import drop_in_mid_transfer
from kvtool.lab.simulator.traces import LinkTrace


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """A level's `bits` a number of K and V, all that is read for it included, and its `loss`, nats a token."""

    bits: float
    loss: float


@dataclass(frozen=True, slots=True)
class LevelTable:
    """The levels of a model, the coarsest first, and where their numbers are from."""

    levels: Mapping[str, LevelFacts]
    source: str


# Qwen2.5-Coder-0.5B on XQuAD-en, 100 questions (`kvtool inspect codec`); `lossless` is SmolLM2's on the sample corpus.
DEFAULT_LEVELS = LevelTable(
    {
        "4": LevelFacts(0.49, 0.0792),
        "3": LevelFacts(1.11, 0.0096),
        "2": LevelFacts(2.19, 0.0017),
        "1": LevelFacts(3.62, 0.0006),
        "int8": LevelFacts(8.25, 0.0017),
        "lossless": LevelFacts(16 * 562 / 821, 0.0),
        RAW: LevelFacts(16.0, 0.0),
    },
    "bits and losses of Qwen2.5-Coder-0.5B on XQuAD-en, lossless of SmolLM2",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated besides the traces.

    Attributes
    ----------
    ready_mbps : the steady link over which it is told how soon the context is there: CacheGen's own (section 7).
    case : the trace whose transfers are told one by one.
    """

    ready_mbps: float = 3000.0
    case: LinkTrace = field(default_factory=drop_in_mid_transfer)


# TensorRT-LLM v0.6.1, docs/source/performance.md, "Low Latency": LLaMA 7B on one A100, FP16, batch 1: seconds to the
# first token by input tokens. The two give the FLOP/s of a long prompt, and what a pass costs before its first row.
LLAMA_7B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "mlp": 11008, "words": 32000}
LLAMA_7B_SECONDS = ((128, 0.016), (2048, 0.133))
LLAMA_7B_SOURCE = "LLaMA 7B on an A100 in TensorRT-LLM v0.6.1 (2,048 tokens in 133 ms)"
# By NVIDIA's data sheets, TFLOP/s of dense 16-bit products over an A100's: the other one is taken to reach the same
# share of its peak.
GPUS = {"a100": 1.0, "a40": 149.7 / 312}


def read_levels(path: Path) -> LevelTable:
    """Levels from what `inspect codec --json` or `compress --json` gave, `raw` added.

    Raises
    ------
    UsageError : the file cannot be read, or has no level with its bits and its loss.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows = value["schemes"] if "schemes" in value else value["levels"]
        levels = {str(row.get("scheme", row.get("level"))): _facts(row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "--levels takes what `kvtool inspect codec --json` or `kvtool compress --json` gave"
        raise UsageError(f"{str(path)!r} has no levels with bits and losses: {error}", hint) from error
    by_size = sorted(levels.items(), key=lambda level: level[1].bits)
    return LevelTable(dict(by_size) | {RAW: LevelFacts(16.0, 0.0)}, f"bits and losses of {path}")


def _facts(row: Mapping[str, float]) -> LevelFacts:
    return LevelFacts(float(row["bits_per_element"]), float(row["kl_answer"]))
