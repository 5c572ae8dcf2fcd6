"""`kvtool bench`: the tool's numbers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.bench_stream import stream
from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import list_of
from kvtool.cli.sessions import open_session
from kvtool.core.cache.options import StoreOptions
from kvtool.core.codec.levels import check_level
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.selectors import MODES, REFERENCE
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.lab.bench.codec import CodecBench
    from kvtool.lab.bench.fusion import FusionBench, FusionEvents, FusionOptions

app = new_app("Measure on this machine, beside plain transformers in the same run.")
app.command()(stream)


@app.command()
@takes(ModelOptions, StoreOptions)
def ingest(
    run: Run,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much of the store to prefill again.")] = 8192,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
) -> None:
    """Ingest the store's own documents again into a scratch store, against plain batched prefill of the same chunks."""
    from kvtool.core.cache.store import Store
    from kvtool.lab.bench.ingest import bench_ingest, files_of

    with Store.open(run.folder) as store:
        session = open_session(run, store)
        files = files_of(store, session.identity, tokens)
        if not files:
            raise KvtoolError("the store holds no documents", "run `kvtool ingest PATH` first")
        result = bench_ingest(session.decoder, session.identity, files, repeat)
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in result.to_json().items()]
    run.out.result(result.to_json(), human=lambda: run.out.table(("what", "value"), rows))


@app.command()
@takes(StoreOptions)
def codec(
    run: Run,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much of the store to encode and decode.")] = 8192,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Beside one thread.", show_default="one a core")
    ] = None,
    coder: Annotated[
        str | None,
        typer.Option("--coder", metavar="avx512|avx2|scalar|numpy", help="Entropy coder.", show_default="the best"),
    ] = None,
) -> None:
    """Encode and decode the store's own exact chunks, beside memcpy, zstandard and the products of the transform."""
    from kvtool.core.cache.store import Store
    from kvtool.lab.bench.codec import bench_codec

    with (
        Store.open(run.folder) as store,
        run.out.progress("measure", total=repeat + 1, unit="rounds") as bar,
    ):
        result = bench_codec(store, tokens, repeat, threads, coder, advance=lambda: bar.advance(1))
    run.out.result(result.to_json(), human=lambda: _show_codec(run, result))


def _show_codec(run: Run, result: CodecBench) -> None:
    from kvtool.lab.bench.first_call import INCLUDES

    rows = [
        (
            " ".join(filter(None, (row.what, row.level))),
            row.threads,
            row.note or "-" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
            "-" if row.bits_per_element is None else f"{row.bits_per_element:.3f}",
            "-" if row.gflop_per_s is None else f"{row.gflop_per_s:.0f}",
            "-" if row.flops_per_byte is None else f"{row.flops_per_byte:.0f}",
            row.batch,
        )
        for row in result.rows
    ]
    head = ("what", "threads", "GB/s of 16-bit KV", "bits/element", "GFLOP/s", "FLOPs/byte", "at once")
    run.out.table(head, rows)
    about = "the store's profile" if result.profile else "no profile: the mean predictor"
    run.out.print(
        f"{result.model}: {result.chunks} chunks, {result.tokens} tokens, {about}; entropy coder {result.backend}; "
        f"{result.cores} cores; medians of {result.repeat} rounds"
    )
    run.out.print(f"first decode in a new process: {result.first_call_ms:.0f} ms ({INCLUDES})")


@app.command()
@takes(
    QueryOptions.some("ratio", "link_tokens", "link"), IngestOptions.some("chunk_tokens"), ModelOptions, StoreOptions
)
def fusion(
    run: Run,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help="Random weights of this model's size, instead of the store's."),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--context", metavar="N,N", help="Tokens of the whole prompt.", show_default="2048"),
    ] = None,
    fusion: Annotated[
        list[str] | None, typer.Option("--fusion", metavar="a,b,c", help="Modes.", show_default="all but full")
    ] = None,
    question_tokens: Annotated[int, typer.Option("--question-tokens", min=1, help="Length of the question.")] = 32,
    level: Annotated[
        str, typer.Option("--level", metavar="raw|lossless|1..4", help="Codec level that is read.")
    ] = "raw",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 5,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the result.")] = None,
) -> None:
    """Time to the first token of every fusion mode, beside full prefill in the same run.

    --ratio and --link-tokens are those of a query; --chunk-tokens is for --shape, a store has its own chunks.
    """
    modes, contexts = _modes(fusion), _contexts(context)
    check_level(level)
    from kvtool.lab.bench.fusion import FusionEvents, FusionOptions, passes
    from kvtool.lab.bench.scratch import Sizes

    options = FusionOptions(
        modes=modes,
        sizes=Sizes(contexts, run.get(IngestOptions).chunk_tokens or SplitSettings().max_tokens, question_tokens),
        level=level,
        repeat=repeat,
        query=run.get(QueryOptions),
    )
    with run.out.progress("measure", total=passes(options), unit="passes") as bar:
        result = _measured(run, shape, options, FusionEvents(bar.describe, lambda: bar.advance(1)))
    if plot is not None:
        _draw(result, plot)
    for note in result.notes:
        run.out.warning(note)
    run.out.result(result.to_json(), human=lambda: _show_fusion(run, result))


def _modes(given: list[str] | None) -> tuple[str, ...]:
    modes = list_of(given) or [mode for mode in MODES if mode != REFERENCE]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise UsageError(f"--fusion: there is no fusion mode {', '.join(unknown)}", f"known: {', '.join(MODES)}")
    return tuple(modes)


def _contexts(given: list[str] | None) -> tuple[int, ...]:
    words = list_of(given) or ["2048"]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--context: {','.join(words)!r} is no list of token counts", "such as --context 1024,4096")
    return tuple(map(int, words))


def _measured(run: Run, shape: str | None, options: FusionOptions, events: FusionEvents) -> FusionBench:
    from kvtool.core.cache.store import Store
    from kvtool.lab.bench.fusion import bench_shape, bench_store

    if shape is not None:
        wanted = run.get(ModelOptions)
        return bench_shape(shape, wanted.device, wanted.dtype, options, events)
    with Store.open(run.folder) as store:
        session = open_session(run, store)
        return bench_store(store, session, options, events)


def _draw(result: FusionBench, path: Path) -> None:
    from kvtool.lab.charts.fusion import fusion_chart

    path.write_text(fusion_chart(result), encoding="utf-8")


def _show_fusion(run: Run, result: FusionBench) -> None:
    from kvtool.lab.charts.fusion import TABLE_HEAD, fusion_notes, fusion_table

    run.out.table(TABLE_HEAD, fusion_table(result))
    for line in fusion_notes(result):
        run.out.print(line)
