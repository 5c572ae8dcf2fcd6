"""`kvtool bench stream`: policies of streaming over bandwidth traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.options import Run, takes
from kvtool.cli.parsing import list_of
from kvtool.core.cache.options import StoreOptions
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR, PREDICTORS, make_estimator
from kvtool.core.streaming.policy import DEPTH

if TYPE_CHECKING:
    from kvtool.core.fusion.speeds import PassSpeed
    from kvtool.lab.bench.stream import StreamBench
    from kvtool.lab.bench.stream_context import Context
    from kvtool.lab.bench.stream_data import LevelTable
    from kvtool.lab.bench.stream_speeds import GivenSpeeds
    from kvtool.lab.simulator.traces import LinkTrace

_SLO_MS = "300,500,1000,2000"


@takes(ModelOptions.some("device"), StoreOptions)
def stream(
    run: Run,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="NAME", help="KV of this model's size, instead of the store's.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", metavar="FILE", help="Bandwidth over time.", show_default="generated ones"),
    ] = None,
    slo_ms: Annotated[
        list[str] | None, typer.Option("--slo-ms", metavar="MS,MS", help="Objectives.", show_default=_SLO_MS)
    ] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of all chunks.")] = 10_000,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="With --shape.")] = 1500,
    gpu: Annotated[str, typer.Option("--gpu", metavar="a100|a40", help="What computes, with --shape.")] = "a100",
    prefill: Annotated[
        float | None,
        typer.Option("--prefill-tokens-per-second", help="Instead.", show_default="of the GPU, or measured"),
    ] = None,
    decode: Annotated[
        float | None, typer.Option("--decode-gb-per-s", help="GB/s of decoded KV.", show_default="not counted")
    ] = None,
    predictor: Annotated[
        str, typer.Option("--predictor", metavar="|".join(PREDICTORS), help="Of the bandwidth.")
    ] = DEFAULT_PREDICTOR,
    margin: Annotated[
        float, typer.Option("--margin", min=0, max=0.99, help="Share of the prediction not counted on.")
    ] = DEFAULT_MARGIN,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Requests outstanding at once.")] = DEPTH,
    levels: Annotated[
        Path | None,
        typer.Option(
            "--levels",
            metavar="FILE.json",
            help="With --shape: bits and losses by level, as `inspect codec --json` gives them.",
            show_default="those of a small model",
        ),
    ] = None,
    write_traces: Annotated[
        Path | None, typer.Option("--write-traces", metavar="FOLDER", help="Write the generated traces there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw it; also FILE-classes.svg, FILE-drop.svg.")
    ] = None,
) -> None:
    """How often policies of streaming meet objectives for the first token over a varying link, and what they lose.

    A simulation: the policies are those of a real link, the link and the computing are computed. KV sizes and losses
    are measured ones: with --shape those of --levels, else the store's own.
    """
    from kvtool.lab.bench.stream import StreamOptions, bench_stream
    from kvtool.lab.bench.stream_data import DEFAULT_LEVELS, GPUS, read_levels
    from kvtool.lab.bench.stream_speeds import GivenSpeeds

    if gpu not in GPUS:
        raise UsageError(f"--gpu: there are no speeds of {gpu!r}", f"known: {', '.join(GPUS)}")
    make_estimator(predictor)  # refuses an unknown one before anything is done
    for flag, value in (("--prefill-tokens-per-second", prefill), ("--decode-gb-per-s", decode)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag}: {value:g} is no speed", "a number above 0")
    options = StreamOptions(_objectives(slo_ms), predictor, margin, depth)
    traces = _traces(trace, write_traces)
    speeds = GivenSpeeds(gpu, prefill, None if decode is None else decode * 1e9)
    table = DEFAULT_LEVELS if levels is None else read_levels(levels)
    streamed = _context(run, shape, context, chunk_tokens, speeds, table)
    with run.out.progress("simulate", total=len(traces) * len(options.slo_ms), unit="traces") as bar:
        result = bench_stream(streamed, traces, options, lambda: bar.advance(1))
    if plot is not None:
        _draw(result, plot)
    run.out.result(result.to_json(), human=lambda: _show(run, result))


def _objectives(given: list[str] | None) -> tuple[float, ...]:
    words = list_of(given) or _SLO_MS.split(",")
    try:
        found = tuple(map(float, words))
    except ValueError:
        found = (0.0,)
    if not all(math.isfinite(one) and one > 0 for one in found):
        raise UsageError(f"--slo-ms: {','.join(words)!r} is no list of milliseconds", "such as --slo-ms 300,1000")
    return found


def _traces(given: list[Path] | None, folder: Path | None) -> list[LinkTrace]:
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


def _context(
    run: Run, shape: str | None, context: int, chunk_tokens: int, speeds: GivenSpeeds, table: LevelTable
) -> Context:
    from kvtool.core.cache.store import Store
    from kvtool.lab.bench.stream_context import shape_context, store_context

    if shape is not None:
        return shape_context(shape, context, chunk_tokens, speeds, table)
    with Store.open(run.folder) as store:
        return store_context(store, context, speeds, None if speeds.prefill else _measured(run, store))


def _measured(run: Run, store: Any) -> PassSpeed | None:
    """How fast this machine computes the store's model, if that was measured once."""
    from kvtool.core.model.load import resolve_device
    from kvtool.core.session.identity import store_identity
    from kvtool.core.session.speeds import recalled

    identity = store_identity(store)
    known = recalled(
        store, identity.fingerprint, resolve_device(run.get(ModelOptions).device), identity.dtype, layers=1
    )
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
