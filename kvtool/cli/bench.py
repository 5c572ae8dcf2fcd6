"""`kvtool bench`: the tool's numbers on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import store_path
from kvtool.core.errors import KvtoolError

if TYPE_CHECKING:
    from kvtool.core.bench.codec import CodecBench

app = new_app("Measure on this machine, beside plain transformers in the same run.")


@app.command()
@takes()
def ingest(
    run: Run,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much of the store to prefill again.")] = 8192,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
) -> None:
    """Ingest the store's own documents again into a scratch store, against plain batched prefill of the same chunks."""
    from kvtool.core.bench.ingest import bench_ingest, files_of
    from kvtool.core.cache.store import Store
    from kvtool.core.query.session import Session

    settings = run.settings
    with Store.open(store_path(settings.store)) as store:
        session = Session.open(
            store, model=settings.model, device=settings.device, dtype=settings.dtype, offline=settings.offline
        )
        files = files_of(store, session.identity, tokens)
        if not files:
            raise KvtoolError("the store holds no documents", "run `kvtool ingest PATH` first")
        result = bench_ingest(session.decoder, session.identity, files, repeat)
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in result.to_json().items()]
    run.out.result(result.to_json(), human=lambda: run.out.table(("what", "value"), rows))


@app.command()
@takes()
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
    from kvtool.core.bench.codec import bench_codec
    from kvtool.core.cache.store import Store

    with (
        Store.open(store_path(run.settings.store)) as store,
        run.out.progress("measure", total=repeat + 1, unit="rounds") as bar,
    ):
        result = bench_codec(store, tokens, repeat, threads, coder, advance=lambda: bar.advance(1))
    run.out.result(result.to_json(), human=lambda: _show_codec(run, result))


def _show_codec(run: Run, result: CodecBench) -> None:
    from kvtool.core.bench.first_call import INCLUDES

    rows = [
        (
            " ".join(filter(None, (row.what, row.level))),
            row.threads,
            row.note or "-" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
            "-" if row.bits_per_element is None else f"{row.bits_per_element:.3f}",
            "-" if row.gflops is None else f"{row.gflops:.0f}",
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
