"""Speeds of the side that streams to: prompts and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtool.core.codec.levels import LEVELS
from kvtool.core.fusion.plan import PassSpeed
from samples.benchmarks.bench.machine import Architecture, LayerWeights, flops, full_work

# TensorRT-LLM v0.6.1, docs/source/performance.md, "Low Latency": LLaMA 7B on one A100, FP16, batch 1: seconds to the
# first token by input tokens. The two give the FLOP/s of a long prompt, and what a pass costs before its first row.
LLAMA_7B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "mlp": 11008, "words": 32000}
LLAMA_7B_SECONDS = ((128, 0.016), (2048, 0.133))
LLAMA_7B_SOURCE = "LLaMA 7B on an A100 in TensorRT-LLM v0.6.1 (2,048 tokens in 133 ms)"
# By NVIDIA's data sheets, TFLOP/s of dense 16-bit products over an A100's: the other one is taken to reach the same
# share of its peak.
GPUS = {"a100": 1.0, "a40": 149.7 / 312}


# Levels whose decoding takes time worth counting.
_DECODED = [name for name, level in LEVELS.items() if not level.verbatim]


@dataclass(frozen=True, slots=True)
class GivenSpeeds:
    """Speeds that the user gave.

    Attributes
    ----------
    gpu : one of `GPUS`, where `prefill` is None.
    prefill : tokens a second, however long the context.
    decode : bytes a second of decoded KV; None: decoding is not counted.
    """

    gpu: str = "a100"
    prefill: float | None = None
    decode: float | None = None

    def given(self) -> PassSpeed | None:
        """The speed of prompts, where it was given."""
        return None if self.prefill is None else PassSpeed(0.0, 1 / self.prefill, 0.0)

    def on_gpu(self, config: Any) -> PassSpeed:
        """The speed of prompts for a model of this `transformers` configuration on the GPU."""
        known, model = _architecture(**LLAMA_7B), _architecture(**sizes_of(config))
        (few, quick), (many, slow) = LLAMA_7B_SECONDS
        little, much = (flops(known, [full_work(length, (None,) * len(known.layers))]) for length in (few, many))
        rate = (much - little) / (slow - quick)  # FLOP/s
        before = quick - little / rate  # seconds before the first row: about what reading the weights takes
        linear, share = _linear(model), GPUS[self.gpu]
        return PassSpeed(
            fixed=before * linear / _linear(known) / share,
            row=2 * linear / rate / share,
            key=4 * model.head_channels * len(model.layers) / rate / share,
        )

    def by_level(self, bytes_per_token: float) -> dict[str, float]:
        """Return the seconds of decoding a token, by level; a level that is not listed takes none."""
        return {} if self.decode is None else dict.fromkeys(_DECODED, bytes_per_token / self.decode)

    def told(self, otherwise: str) -> Iterator[str]:
        """Yield the sources of the speeds; `otherwise`: that of prompts if no speed was given."""
        yield otherwise if self.prefill is None else f"prefill {self.prefill:g} tokens/s, as given"
        if self.decode is None:
            yield "decoding is not counted"
        else:
            yield f"decoding to {self.decode / 1e9:g} GB/s of KV, as given"

    def told_of_gpu(self) -> str:
        """Return the source of the speed of prompts on the GPU."""
        if self.gpu == "a100":
            return f"prefill at the FLOP/s of {LLAMA_7B_SOURCE}"
        return f"prefill at the share of an {self.gpu.upper()}'s peak FLOP/s that is reached by {LLAMA_7B_SOURCE}"


def sizes_of(config: Any) -> dict[str, int]:
    """Return the sizes of a `transformers` configuration that decide FLOPs and bytes."""
    return {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "mlp": config.intermediate_size,
        "words": config.vocab_size,
    }


def _architecture(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, words: int
) -> Architecture:
    """Make the architecture of a decoder with gated MLPs, as all shapes are."""
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp
    return Architecture((LayerWeights(weights, weights),) * layers, heads * head_dim, hidden * words)


def _linear(model: Architecture) -> int:
    return sum(layer.used for layer in model.layers)
