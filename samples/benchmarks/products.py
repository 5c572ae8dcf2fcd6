"""Products of packed weights against plain ones and against memory; run `python samples/benchmarks/products.py --help`.

For every kind of weights that a GGUF file may have: what one row takes, multiplied with the packed weights, and what
unpacking them takes, on each instruction set that this CPU runs; GB/s count the packed weights read, `of sum` is that
by what a plain sum over memory of the same size reads, `int8` those of a row of 8-bit integers. Then, for `--kind`, a
pass of several rows through all weights by several ways: plain weights (`dense`), unpacked before each product
(`unpacked`, as an ingest does it), unpacked some at a time and multiplied in the cache (`few`, as a question's rows
are), with the rows in 8-bit integers (`int8`, as with `--dtype int8`) and one packed product for each row (`by row`);
in bfloat16 also with weights that oneDNN has laid out (`onednn`). All take turns, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from attention import least

from kvtool.core.kernels.linear.modules import PackedLinear, can_pack, pack_weights
from kvtool.core.kernels.linear.qtensor import LAYOUTS, QuantizedTensor, dense, none
from kvtool.core.kernels.linear.quantized import dequantize_rows, gemv, has_int8_row
from kvtool.core.native.isa import ISAS, Isa, best_isa, multiplies_int8, runnable

HIDDEN, INNER = 1024, 2816  # of a model of half a billion parameters
SHAPES = [(HIDDEN, HIDDEN), (HIDDEN // 4, HIDDEN), (HIDDEN // 4, HIDDEN), (HIDDEN, HIDDEN)]
SHAPES += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
INPUTS = {columns: torch.randn(columns) for columns in (HIDDEN, INNER)}
SCRATCH = torch.empty(HIDDEN * INNER)
ROWS = (1, 2, 4, 8, 16, 32, 64, 160, 320, 1024)


def random_matrix(kind: str, rows: int, columns: int) -> QuantizedTensor:
    """Random codes; scales and group_mins of the size of a model's."""
    layout = LAYOUTS[kind]
    if layout.dense:
        return dense(torch.randn(rows, columns).to(getattr(torch, kind)))
    data = torch.randint(0, 256, (rows, layout.row_bytes(columns)), dtype=torch.uint8)
    if layout.superblocks:
        scales = torch.full((rows, layout.scales_of_row(columns)), 1, dtype=torch.uint8)
        return QuantizedTensor(kind, rows, columns, data, scales, none())
    scales, group_mins = (torch.randn(2, rows, layout.scales_of_row(columns)) * 0.01).half()
    return QuantizedTensor(kind, rows, columns, data, scales, group_mins if layout.group_mins else none())


def multiplied(matrices: list[QuantizedTensor], isa: Isa, int8: bool = False) -> None:
    """Multiply one row with all weights."""
    for matrix in matrices:
        gemv(matrix, INPUTS[matrix.columns], isa, int8)


def unpacked(matrices: list[QuantizedTensor], isa: Isa) -> None:
    """All weights unpacked, each over the one before."""
    for matrix in matrices:
        dequantize_rows(matrix, 0, matrix.rows, SCRATCH, isa)


def kinds(layers: int, rounds: int, clock: Callable[[], float]) -> None:
    """Every kind on every instruction set."""
    print(
        f"{'kind':9} {'isa':7} {'MB':>6} {'row ms':>7} {'GB/s':>6} {'of sum':>6} {'int8':>6} {'unpack':>9} {'G/s':>5}"
    )
    for kind, layout in LAYOUTS.items():
        matrices = [random_matrix(kind, *shape) for _ in range(layers) for shape in SHAPES]
        size, count = sum(m.nbytes for m in matrices), sum(m.rows * m.columns for m in matrices)
        calls: dict[str, Callable[[], object]] = {"sum": torch.zeros(size // 8, dtype=torch.int64).sum}
        for isa in (ISAS[name] for name in runnable()):
            calls[f"{isa} row"] = partial(multiplied, matrices, isa)
            if (own := multiplies_int8(isa)) and all(has_int8_row(matrix, own) for matrix in matrices):
                calls[f"{isa} int8"] = partial(multiplied, matrices, own, True)
            if not layout.dense:
                calls[f"{isa} unpack"] = partial(unpacked, matrices, isa)
        took = least(calls, rounds, clock)
        for isa in (ISAS[name] for name in runnable()):
            row, unpack = took[f"{isa} row"], took.get(f"{isa} unpack")
            line = (
                f"{kind:9} {isa.name:7} {size / 1e6:6.0f} {row * 1e3:7.2f} {size / row / 1e9:6.1f} "
                f"{took['sum'] / row:6.2f} "
                + (f"{size / took[f'{isa} int8'] / 1e9:6.1f}" if f"{isa} int8" in took else " " * 6)
            )
            print(line + (f" {unpack * 1e3:9.1f} {count / unpack / 1e9:5.1f}" if unpack else ""), flush=True)


@torch.inference_mode()
def rows(kind: str, dtype: torch.dtype, layers: int, rounds: int, clock: Callable[[], float]) -> None:
    """A pass of several rows through all weights, by each way."""
    matrices = [random_matrix(kind, *shape) for _ in range(layers) for shape in SHAPES]
    packed = [PackedLinear(matrix, None, dtype) for matrix in matrices]
    whole = [PackedLinear(matrix, None, dtype, int8=True) for matrix in matrices]
    plain = [
        dequantize_rows(matrix, 0, matrix.rows, torch.empty(matrix.rows, matrix.columns, dtype=dtype))
        for matrix in matrices
    ]
    laid_out = _laid_out(plain) if can_pack(plain[0]) else []
    count = sum(weight.numel() for weight in plain)
    print(f"\n{kind}, {count / 1e6:.0f} million weights, {best_isa()}, {dtype}: ms of a pass")
    for number in ROWS:
        given = {columns: torch.randn(number, columns).to(dtype) for columns in (HIDDEN, INNER)}
        calls: dict[str, Callable[[], object]] = {
            "dense": lambda g=given: [F.linear(g[weight.shape[1]], weight) for weight in plain],
            "unpacked": lambda g=given: [layer.unpacked_product(g[layer.in_features]) for layer in packed],
        }
        if number > 1:
            calls["few"] = lambda g=given: [layer.rows_product(g[layer.in_features]) for layer in packed]
        if number > 1 and dtype == torch.float32 and all(layer.int8 for layer in whole):
            calls["int8"] = lambda g=given: [layer.rows_product(g[layer.in_features]) for layer in whole]
        if laid_out:
            calls["onednn"] = lambda g=given: [layer(g[layer.in_features]) for layer in laid_out]
        if number <= 16:
            calls["by row"] = lambda g=given: [
                layer(row[None]) for layer in packed for row in g[layer.in_features].unbind()
            ]
        took = least(calls, max(2, rounds // (1 + number // 64)), clock)
        times = "  ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in took.items())
        print(f"{number:5} rows: {times}  | dense {2 * count * number / took['dense'] / 1e9:.0f} GFLOP/s", flush=True)


def _laid_out(weights: list[torch.Tensor]) -> list[torch.nn.Linear]:
    layers = []
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        pack_weights(layer)
        layers.append(layer)
    return layers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kind", default="q4_1", choices=[kind for kind, layout in LAYOUTS.items() if not layout.dense]
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=8, help="of 12 million weights each; fewer stay in the cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: on a machine that others use, too")
    asked = parser.parse_args()
    torch.set_num_threads(1 if asked.cpu_time else asked.threads)
    clock = time.thread_time if asked.cpu_time else time.perf_counter
    kinds(asked.layers, asked.rounds, clock)
    rows(asked.kind, getattr(torch, asked.dtype), asked.layers, asked.rounds, clock)


if __name__ == "__main__":
    main()
