"""`kvtool bench stream`: policies of streaming over bandwidth traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.lab.bench.options import StreamBenchOptions

if TYPE_CHECKING:
    from kvtool.core.fusion.cost import PassSpeed
    from kvtool.lab.bench.stream import StreamBench
    from kvtool.lab.bench.stream_context import Context
    from kvtool.lab.bench.stream_data import LevelTable
    from kvtool.lab.bench.stream_speeds import GivenSpeeds
    from kvtool.lab.simulator.traces import LinkTrace


@takes(
    StreamBenchOptions,
    ModelOptions.some("device"),
    StoreOptions,
    examples=("bench stream --shape llama-3.1-8b", "bench stream --trace link.csv --slo-ms 300,1000 --plot met.svg"),
)
def stream(run: Run) -> None:
    """How often streaming meets its objectives over a varying link.

    A simulation of what its policies meet and what they lose: the policies are those of a real link, the link and the
    computing are computed. KV sizes and losses are measured ones: with --shape those of --levels, else the store's own.
    """
    from kvtool.lab.bench.stream import StreamOptions, bench_stream
    from kvtool.lab.bench.stream_data import DEFAULT_LEVELS, GPUS, read_levels
    from kvtool.lab.bench.stream_speeds import GivenSpeeds

    wanted = run.get(StreamBenchOptions)
    if wanted.gpu not in GPUS:
        raise UsageError(f"--gpu: there are no speeds of {wanted.gpu!r}", f"known: {', '.join(GPUS)}")
    options = StreamOptions(wanted.slo_ms, wanted.predictor, wanted.margin, wanted.depth)
    traces = _traces(wanted.trace, wanted.write_traces)
    decode = wanted.decode_gb_per_s
    speeds = GivenSpeeds(wanted.gpu, wanted.prefill_tokens_per_second, None if decode is None else decode * 1e9)
    table = DEFAULT_LEVELS if wanted.levels is None else read_levels(wanted.levels)
    streamed = _context(run, wanted, speeds, table)
    with run.out.progress("simulate", total=len(traces) * len(options.slo_ms), unit="traces") as bar:
        result = bench_stream(streamed, traces, options, lambda: bar.advance(1))
    if wanted.plot is not None:
        _draw(result, wanted.plot)
    run.out.result(result.to_json(), human=lambda: _show(run, result))


def _traces(given: Sequence[Path], folder: Path | None) -> list[LinkTrace]:
    from kvtool.lab.bench.stream_traces import generate
    from kvtool.lab.simulator.traces import read_trace, write_trace

    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for one in generate():
                write_trace(one, folder / f"{one.name}.csv")
        except OSError as error:
            raise UsageError(f"--write-traces: {error}", "name a folder that can be written") from error
    return [read_trace(path) for path in given] if given else generate()


def _context(run: Run, wanted: StreamBenchOptions, speeds: GivenSpeeds, table: LevelTable) -> Context:
    from kvtool.core.cache.store import Store
    from kvtool.lab.bench.stream_context import shape_context, store_context

    if wanted.shape is not None:
        return shape_context(wanted.shape, wanted.context, wanted.chunk_tokens, speeds, table)
    with Store.open(run.folder) as store:
        return store_context(store, wanted.context, speeds, None if speeds.prefill else _measured(run, store))


def _measured(run: Run, store: Any) -> PassSpeed | None:
    """How fast this machine computes the store's model, if that was measured once."""
    from kvtool.core.checkpoint.load import resolve_device
    from kvtool.core.session.session import Session
    from kvtool.core.session.speeds import recalled

    wanted = run.get(ModelOptions)
    session, device = Session(store, wanted), resolve_device(wanted.device)
    known = recalled(store, session.identity.fingerprint, device, session.arithmetic.dtype, layers=1)
    return None if known is None else known.passes


def _draw(result: StreamBench, path: Path) -> None:
    from kvtool.lab.charts.stream import stream_chart
    from kvtool.lab.charts.stream_figures import classes_figure, drop_figure

    figures = {"": stream_chart, "-classes": classes_figure, "-drop": drop_figure}
    try:
        for suffix, figure in figures.items():
            path.with_name(f"{path.stem}{suffix}{path.suffix}").write_text(figure(result), encoding="utf-8")
    except OSError as error:
        raise KvtoolError(f"the figure cannot be written: {error}", "name a file in a folder that is there") from error


def _show(run: Run, result: StreamBench) -> None:
    from kvtool.lab.charts.stream import CASE_HEAD, READY_HEAD, case_table, ready_table, stream_notes, stream_table

    head, rows = stream_table(result)
    run.out.table(head, rows)
    run.out.table(READY_HEAD, ready_table(result))
    run.out.table(CASE_HEAD, case_table(result))
    for line in stream_notes(result):
        run.out.print(line)
