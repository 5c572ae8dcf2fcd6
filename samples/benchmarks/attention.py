"""Attention kernels compared with each other and with a plain product; see --help.

Every kernel of KVTOOL_ATTENTION that this CPU has computes the same rows in turn, round after round; the least time of
each counts. GFLOP/s count the keys that a row sees (4 · head_dim for each and each head), so that they compare with the
product's. `dense`: a whole prompt; `rows`: a share of a prompt's rows, where they fall; `question`: its last 32;
`chunks`: 256 tokens each after a lead-in of 64, in one batch, as at ingest.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvtool.core.common.machine import ATTENTION
from kvtool.core.kernels.attention.dispatch import BACKENDS, explain
from kvtool.core.kernels.attention.flash_cpu import tiling_here
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams
from kvtool.core.model.forward import PackedChunks, QueryRows

HEADS = {
    "smollm2-135m": (9, 3, 64),
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen3-0.6b": (16, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
}
CHUNK, LEAD_IN, QUESTION = 256, 64, 32
PRODUCT = (1024, 896, 4864)  # rows, columns, outputs: of an MLP


@dataclass(frozen=True, slots=True)
class Case:
    """What is computed: its name, its floating point operations, and how."""

    name: str
    flops: int
    run: Callable[[], torch.Tensor]


def cases(heads: tuple[int, int, int], keys: int, share: float, dtype: torch.dtype) -> Iterator[Case]:
    """Rows over a prompt of so many tokens."""
    query_heads, kv_heads, head_dim = heads
    draw = torch.Generator().manual_seed(0)

    def random(tokens: int, count: int) -> torch.Tensor:
        return torch.randn((1, tokens, count, head_dim), generator=draw).to(dtype).transpose(1, 2)

    key, value = (random(keys, kv_heads).contiguous() for _ in range(2))
    scoring = AttentionParams(head_dim**-0.5)
    scattered = torch.randperm(keys, generator=draw)[: max(2, int(share * keys))].sort().values
    for name, at in (
        ("dense", torch.arange(keys)),
        ("rows", scattered),
        ("question", torch.arange(keys - QUESTION, keys)),
    ):
        rows, query = QueryRows.of(at, "cpu"), random(len(at), query_heads)
        seen = int(at.sum()) + len(at)
        yield Case(
            name,
            4 * query_heads * head_dim * seen,
            lambda rows=rows, query=query: rows.attend(0, query, key, value, scoring),
        )
    count = max(1, keys // CHUNK)
    lead_in = [(random(LEAD_IN, kv_heads).contiguous(), random(LEAD_IN, kv_heads).contiguous())]
    packed = [random(count * CHUNK, number) for number in (query_heads, kv_heads, kv_heads)]
    chunks = PackedChunks.of([CHUNK] * count, lead_in)
    seen = count * (CHUNK * LEAD_IN + CHUNK * (CHUNK + 1) // 2)
    yield Case("chunks", 4 * query_heads * head_dim * seen, lambda: chunks.attend(0, *packed, scoring))


def least(calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each, the least of several rounds; all once in each round, after one that does not count."""
    best = dict.fromkeys(calls, float("inf"))
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = clock()
            call()
            if number:
                best[name] = min(best[name], clock() - started)
    return best


def forced(kernel: str, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same computation in a kernel of one's choice."""

    def call() -> torch.Tensor:
        os.environ[ATTENTION] = kernel
        return run()

    return call


def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Many rows times a weight, which in bfloat16 is packed as kvtool packs a model's."""
    rows, columns, outputs = PRODUCT
    many, linear = torch.full((rows, columns), 0.5, dtype=dtype), torch.nn.Linear(columns, outputs).to(dtype)
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, rows)
        return lambda: torch.ops.mkldnn._linear_pointwise(many, weight, linear.bias, "none", [], "")
    return lambda: linear(many)


@torch.inference_mode()
def main(given: argparse.Namespace) -> None:
    """Measure and print."""
    torch.set_num_threads(given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    dtype = getattr(torch, given.dtype)
    kernels = [one.name for one in BACKENDS[1:] if one.name != "flash" or tiling_here(dtype) is not None]
    seconds = least({"product": product(dtype)}, 8, clock)["product"]
    limit = 2 * PRODUCT[0] * PRODUCT[1] * PRODUCT[2] / seconds
    unit = "of processor time" if given.threads == 1 else "of wall time"
    print(
        f"{given.dtype}, {given.threads} threads, torch {torch.__version__} with "
        f"{torch.backends.cpu.get_cpu_capability()}; plain product {limit / 1e9:.0f} GFLOP/s {unit}; taken here: "
        f"{explain(AttentionCall('cpu', dtype)).serves.name}"
    )
    print(f"{'heads':>14} {'tokens':>7} {'what':>9} " + " ".join(f"{kernel:>10} {'of it':>5}" for kernel in kernels))
    for name in given.heads.split(","):
        for keys in map(int, given.context.split(",")):
            for case in cases(HEADS[name], keys, given.ratio, dtype):
                if case.name == "dense" and keys > given.skip_dense_above:
                    continue
                calls = {kernel: forced(kernel, case.run) for kernel in kernels}
                times = least(calls, given.rounds, clock)
                cells = (
                    f"{case.flops / times[kernel] / 1e9:10.0f} {case.flops / times[kernel] / limit:5.2f}"
                    for kernel in kernels
                )
                print(f"{name:>14} {keys:7} {case.name:>9} " + " ".join(cells), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--heads", default="smollm2-135m,qwen2.5-0.5b,qwen3-0.6b", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--context", default="1024,4096,16384", help="tokens of the prompt, several with commas")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of rows that are scattered")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="with one, processor time is measured, which other programs do not change",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-dense-above", type=int, default=8192, metavar="TOKENS")
    main(parser.parse_args())
