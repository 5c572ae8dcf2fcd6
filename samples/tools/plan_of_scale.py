"""A plan on paper: what very many chunks take of bytes, requests, dollars and GPU hours.

    python samples/tools/plan_of_scale.py [--chunks 1e9] [--store-chunks 1e6] [--usd-per-gb-month 0.023] ...

Nothing is measured here: shapes and bits are given (samples/results/codec.md), prices are list prices that you replace
by your own, and the rest is arithmetic. It prints the tables of `kvtool help scale`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import ceil

from kvtool.core.remote.catalogue_io import count_for
from kvtool.core.remote.send import PACK_BYTES

GB, HOURS = 1e9, 3600.0
DESCRIBED = 2_000  # bytes of a chunk of 256 tokens: ids, sensitivities, its share of a document's packed text
INDEXED = 950  # bytes of a chunk in the index of words (samples/results/retrieval.md: 95 MB for 100,000)
FILE_CHUNKS = 10  # of a document


@dataclass(frozen=True, slots=True)
class Model:
    """Numbers of KV for a token, parameters that compute one, and bits a number by level."""

    name: str
    numbers: int
    parameters: float
    bits: dict[str, float]


MODELS = (
    Model("SmolLM2-135M", 30 * 2 * 3 * 64, 0.135e9, {"raw": 16.0, "1": 3.91, "2": 2.40, "3": 1.20, "4": 0.47}),
    Model(
        "Mistral-7B (8 KV heads)",
        32 * 2 * 8 * 128,
        7.25e9,
        {"raw": 16.0, "1": 3.62, "2": 2.19, "3": 1.11, "4": 0.49},  # of Qwen2.5-Coder-0.5B
    ),
    Model("DeepSeek-V2-Lite (latents)", 27 * 576, 2.4e9, {"raw": 16.0}),
)


def _positive(text: str) -> float:
    if (number := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = (
        ("--chunks", 1e9, "in all"),
        ("--chunk-tokens", 256, "of a chunk"),
        ("--store-chunks", 1e6, "of one store, with one writer"),
        ("--asked-chunks", 5, "of a question"),
        ("--changed-chunks", 10, "of a push of one changed document"),
        ("--usd-per-gb-month", 0.023, "stored"),
        ("--usd-per-1000-gets", 0.0004, ""),
        ("--usd-per-gpu-hour", 3.0, "of an H100"),
        ("--tflops", 989.0, "of the GPU, dense bfloat16"),
        ("--utilisation", 0.4, "of them in a prefill"),
    )
    for flag, default, about in given:
        parser.add_argument(flag, type=_positive, default=default, help=f"{about} (default {default:g})".strip())
    plan = Plan(**vars(parser.parse_args()))
    print("\n\n".join((plan.by_level(), plan.by_model(), plan.by_store())))


@dataclass(frozen=True, slots=True)
class Plan:
    """Given values; see the options."""

    chunks: float
    chunk_tokens: float
    store_chunks: float
    asked_chunks: float
    changed_chunks: float
    usd_per_gb_month: float
    usd_per_1000_gets: float
    usd_per_gpu_hour: float
    tflops: float
    utilisation: float

    def size(self, model: Model, level: str) -> float:
        """Bytes of a chunk's records."""
        return model.numbers * model.bits[level] / 8 * self.chunk_tokens

    def gpu_hours(self, model: Model, chunks: float) -> float:
        """Return the GPU hours of a prefill, at two operations a parameter and token."""
        operations = 2 * model.parameters * self.chunk_tokens * chunks
        return operations / (self.tflops * 1e12 * self.utilisation) / HOURS

    def by_level(self) -> str:
        """Return a table of the cost to keep all chunks at one level, and to fetch some."""
        rows = []
        for model in MODELS:
            for level in model.bits:
                size = self.size(model, level)
                month = size * self.chunks / GB * self.usd_per_gb_month
                again = self.usd_per_gpu_hour * self.gpu_hours(model, 1)
                rows.append(
                    f"| {model.name} | {level} | {size / 1e6:.2g} | {size * self.chunks / 1e12:,.0f} | {month:,.0f} "
                    f"| {month / self.chunks / again:,.1f} | {size * self.asked_chunks / 1e6:.3g} |"
                )
        head = "| model | level | MB a chunk | TB | $ a month | prefills that a month costs | MB a question |"
        return "\n".join((head, "| --- " * 7 + "|", *rows))

    def by_model(self) -> str:
        """The prefill of all of it."""
        rows = []
        for model in MODELS:
            hours = self.gpu_hours(model, self.chunks)
            rows.append(
                f"| {model.name} | {hours:,.0f} | {hours * self.usd_per_gpu_hour:,.0f} | {hours / 24 / 64:,.1f} |"
            )
        return "\n".join(("| model | GPU hours of the prefill | $ | days on 64 GPUs |", "| --- " * 4 + "|", *rows))

    def by_store(self) -> str:
        """Return a table of one store, with one writer and one catalogue, and of all stores."""
        stores = ceil(self.chunks / self.store_chunks)
        shards = count_for(int(self.store_chunks * (1 + 1 / FILE_CHUNKS)))
        packs = ceil(self.store_chunks * DESCRIBED / PACK_BYTES)
        opening = shards + packs + 5
        changed = min(shards, 2 * self.changed_chunks + 1) + 4
        rows = (
            ("chunks", f"{self.store_chunks:.2g}", f"{self.chunks:.2g}"),
            ("shards of the catalogue", f"{shards:,}", f"{shards * stores:,}"),
            ("descriptions, GB", f"{self.store_chunks * DESCRIBED / GB:,.1f}", f"{self.chunks * DESCRIBED / GB:,.0f}"),
            ("index of words, GB", f"{self.store_chunks * INDEXED / GB:,.2f}", f"{self.chunks * INDEXED / GB:,.0f}"),
            ("requests of a new reader", f"{opening:,}", f"{opening * stores:,}"),
            ("$ of them", f"{self._gets(opening):.2g}", f"{self._gets(opening * stores):.2g}"),
            ("requests to see that nothing has changed", "1", f"{stores:,}"),
            ("values that the push of a changed document sends", f"{changed:.0f}", f"{changed:.0f}"),
        )
        head = f"| | one store | all {stores:,} stores |\n| --- | --- | --- |"
        return "\n".join((head, *(f"| {' | '.join(row)} |" for row in rows)))

    def _gets(self, requests: float) -> float:
        return requests / 1000 * self.usd_per_1000_gets


if __name__ == "__main__":
    main()
