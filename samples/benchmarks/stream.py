"""How often streaming policies meet their objectives over a varying link: a simulation over bandwidth traces.

    python samples/benchmarks/stream.py --shape llama-3.1-8b
    python samples/benchmarks/stream.py --store STORE --trace link.csv --slo-ms 300,1000

The policies are those of a real link; the link and the computing are computed. KV sizes and losses are measured ones:
with --shape those of --levels, else the store's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.cli.out import Out
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.load import resolve_device
from kvtool.core.errors import UsageError
from kvtool.core.fusion.plan import PassSpeed
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.session import Session
from kvtool.core.session.speeds import recalled
from kvtool.core.streaming.policy import DEPTH
from samples.benchmarks.script import Parser, parser, positive, run, several, whole
from samples.benchmarks.streaming.bench import StreamBench, StreamOptions, bench_stream
from samples.benchmarks.streaming.context import DEFAULT_LEVELS, Context, read_levels, shape_context, store_context
from samples.benchmarks.streaming.predictors import DEFAULT_PREDICTOR, PREDICTORS
from samples.benchmarks.streaming.speeds import GPUS, GivenSpeeds
from samples.benchmarks.streaming.tables import (
    CASE_HEAD,
    READY_HEAD,
    case_table,
    ready_table,
    stream_notes,
    stream_table,
)
from samples.benchmarks.streaming.traces import generate, read_trace, write_trace


def arguments() -> Parser:
    made = parser(__doc__)
    of = made.add_mutually_exclusive_group(required=True)
    of.add_argument("--shape", metavar="NAME", help="KV of this model's size")
    of.add_argument("--store", type=Path, metavar="FOLDER", help="KV of this store")
    slos = (300.0, 500.0, 1000.0, 2000.0)
    made.add_argument("--slo-ms", type=several(positive), default=slos, metavar="MS,MS", help="objectives")
    made.add_argument("--context", type=whole, default=10_000, metavar="N", help="tokens of all chunks")
    made.add_argument("--chunk-tokens", type=whole, default=1500, metavar="N", help="of a chunk, with --shape")
    made.add_argument("--levels", type=Path, metavar="FILE.json", help="as `inspect codec --json` gives, with --shape")
    made.add_argument("--trace", type=Path, action="append", metavar="FILE", help="bandwidth over time (repeatable)")
    made.add_argument("--predictor", choices=PREDICTORS, default=DEFAULT_PREDICTOR, help="of the bandwidth")
    made.add_argument("--depth", type=whole, default=DEPTH, metavar="N", help="requests outstanding at once")
    made.add_argument("--gpu", choices=GPUS, default="a100", help="what computes, with --shape")
    made.add_argument("--prefill-tokens-per-second", type=positive, metavar="N", help="default: the GPU's, or measured")
    made.add_argument("--decode-gb-per-s", type=positive, metavar="N", help="of decoded KV (default: not counted)")
    made.add_argument("--device", default=ModelOptions().device, help="whose measured speed is taken, with --store")
    made.add_argument("--write-traces", type=Path, metavar="FOLDER", help="write the generated traces there")
    return made


def simulate_all(given: argparse.Namespace, out: Out) -> None:
    """Run every policy over every trace, and show the result."""
    options = StreamOptions(given.slo_ms, given.predictor, given.depth)
    if given.write_traces is not None:
        write_traces(given.write_traces)
    traces = [read_trace(path) for path in given.trace] if given.trace else generate()
    streamed = context_of(given)
    with out.progress("simulate", total=len(traces) * len(options.slo_ms), unit="traces") as bar:
        result = bench_stream(streamed, traces, options, lambda: bar.advance(1))
    out.result(result.to_json(), human=lambda: show(out, result))


def write_traces(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for trace in generate():
            write_trace(trace, folder / f"{trace.name}.csv")
    except OSError as error:
        raise UsageError(f"--write-traces: {error}", "name a folder that can be written") from error


def context_of(given: argparse.Namespace) -> Context:
    decode = given.decode_gb_per_s
    speeds = GivenSpeeds(given.gpu, given.prefill_tokens_per_second, None if decode is None else decode * 1e9)
    if given.shape is not None:
        table = DEFAULT_LEVELS if given.levels is None else read_levels(given.levels)
        return shape_context(given.shape, given.context, given.chunk_tokens, speeds, table)
    with Store.open(given.store) as store:
        return store_context(store, given.context, speeds, None if speeds.prefill else measured(store, given.device))


def measured(store: Store, device: str) -> PassSpeed | None:
    """Return how fast this machine computes the store's model, if that was measured once."""
    session, device = Session.open(store, ModelOptions(device=device)), resolve_device(device)
    known = recalled(store, session.identity.fingerprint, device, session.model.arithmetic.dtype, layers=1)
    return None if known is None else known.passes


def show(out: Out, result: StreamBench) -> None:
    head, rows = stream_table(result)
    out.table(head, rows)
    out.table(READY_HEAD, ready_table(result))
    out.table(CASE_HEAD, case_table(result))
    for line in stream_notes(result):
        out.print(line)


def main(given: Sequence[str] | None = None) -> int:
    return run(arguments(), given, simulate_all)


if __name__ == "__main__":
    sys.exit(main())
