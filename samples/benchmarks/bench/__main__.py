"""Measure on this machine, next to plain transformers: `python -m samples.benchmarks.bench fusion --help`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtool.cli.app import main
from kvtool.cli.commands import new_app
from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.checkpoint.files import PACKAGED
from kvtool.core.common.text import counted
from kvtool.core.common.types import Events
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from samples.benchmarks.bench.options import (
    CodecBenchOptions,
    DecodeBenchOptions,
    FusionBenchOptions,
    IngestBenchOptions,
)

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.session import Session
    from samples.benchmarks.bench.fusion import FusionOptions

app = new_app("Measure speed on this machine, compared with plain transformers in the same run.")


@app.command()
@takes(
    IngestBenchOptions,
    ModelOptions,
    StoreOptions,
)
def ingest(run: Run) -> None:
    """Compare ingesting the store's documents again with plain prefill.

    The ingest writes to a temporary store. The prefill computes the same chunks in batches.
    """
    from kvtool.core.cache.store import Store
    from samples.benchmarks.bench.ingest import bench_ingest, files_of, passes

    options = run.get(IngestBenchOptions)
    with Store.open(run.folder) as store:
        session = _session(run, store)
        files = files_of(store, session.identity, options.tokens)
        if not files:
            raise KvtoolError("the store holds no documents", "run `kvtool ingest PATH` first")
        with run.out.progress("measure", total=passes(options.repeat), unit="passes") as bar:
            events = Events(advance=bar.advance)
            result = bench_ingest(session.decoder, session.identity, files, options.repeat, events)
    run.out.result(result, human=lambda: _show_ingest(run, result))


def _session(run: Run, store: Store) -> Session:
    """Open a store's session, whose model transformers has built: its own forward is measured, too."""
    import torch

    from kvtool.core.checkpoint.load import load_model, resolve_device
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.identity import model_files, store_identity
    from kvtool.core.session.session import Session, StoreModel

    options, identity = run.get(ModelOptions), store_identity(store)
    arithmetic = StoreModel(store, identity, options, run.out.warning).arithmetic.dtype
    loaded = load_model(
        model_files(identity, options, store.made_by()),
        device=resolve_device(options.device),
        dtype=identity.dtype,
        arithmetic=arithmetic,
        packed=True,
        listed=False,
    )
    decoder = Decoder(loaded, kv_dtype=getattr(torch, identity.dtype))
    return Session.open(store, options, decoder=decoder, warn=run.out.warning)


def _show_ingest(run: Run, result: Mapping[str, Any]) -> None:
    facts = {name: value for name, value in result.items() if name != "host"}
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in facts.items()]
    run.out.table(("what", "value"), rows)
    _show_host(run, result)


def _show_host(run: Run, result: Mapping[str, Any]) -> None:
    from samples.benchmarks.bench.machine import Host

    run.out.print(Host(**result["host"]).line())


@app.command()
@takes(
    CodecBenchOptions,
    ModelOptions.some("dtype"),
    StoreOptions,
)
def codec(run: Run) -> None:
    """Compress and decompress the store's own exact chunks.

    The output has the store's number format, as for a query, or that of --dtype. A copy and zstandard are measured in
    the same run.
    """
    from kvtool.core.cache.store import Store
    from samples.benchmarks.bench.codec import bench_codec

    options, dtype = run.get(CodecBenchOptions), run.get(ModelOptions).dtype
    with (
        Store.open(run.folder) as store,
        run.out.progress("measure", total=options.repeat + 1, unit="rounds") as bar,
    ):
        events = Events(advance=bar.advance)
        result = bench_codec(store, options.tokens, options.repeat, options.threads, events, dtype)
    run.out.result(result, human=lambda: _show_codec(run, result))


def _show_codec(run: Run, result: Mapping[str, Any]) -> None:
    rows = [
        (
            " ".join(filter(None, (row["what"], row["level"]))),
            *(row["threads"], f"{row['gb_per_s']:.2f}", f"{row['bits_per_element']:.3f}", row["batch"]),
        )
        for row in result["rows"]
    ]
    run.out.table(("what", "threads", "GB/s of 16-bit KV", "bits/element", "at once"), rows)
    about = "the store's profile" if result["profile"] else "a profile fitted to these"
    run.out.print(
        f"{result['model']}: {counted(result['chunks'], 'chunk')}, {counted(result['tokens'], 'token')}, {about}; "
        f"decoded to {result['decoded_to']}; entropy coder {result['backend']}; medians of {result['repeat']} rounds"
    )
    _show_host(run, result)


@app.command()
@takes(
    FusionBenchOptions,
    QueryOptions.some("ratio", "link_tokens", "link"),
    IngestOptions.some("chunk_tokens"),
    ModelOptions,
    StoreOptions,
)
def fusion(run: Run) -> None:
    """Measure the time to the first token of every fusion mode, next to full prefill.

    Both are measured in the same run. --chunk-tokens is for --shape only, because a store has its own chunks.
    """
    from samples.benchmarks.bench.fusion import FusionOptions, passes
    from samples.benchmarks.bench.prompts import Sizes

    wanted = run.get(FusionBenchOptions)
    chunk_tokens = run.get(IngestOptions).chunk_tokens or SplitSettings().max_tokens
    options = FusionOptions(
        modes=wanted.fusion,
        sizes=Sizes(wanted.context, chunk_tokens, wanted.question_tokens),
        level=wanted.level,
        repeat=wanted.repeat,
        query=run.get(QueryOptions),
        skip_full_above=wanted.skip_full_above,
    )
    with run.out.progress("measure", total=passes(options), unit="passes") as bar:
        result = _measured(run, wanted.shape, options, Events(advance=bar.advance))
    for note in result["notes"]:
        run.out.warning(note)
    run.out.result(result, human=lambda: _show_fusion(run, result))


def _measured(run: Run, shape: str | None, options: FusionOptions, events: Events) -> dict[str, Any]:
    from kvtool.core.cache.store import Store
    from samples.benchmarks.bench.fusion import bench_shape, bench_store

    if shape is not None:
        wanted = run.get(ModelOptions)
        return bench_shape(shape, wanted.device, wanted.dtype, options, events)
    with Store.open(run.folder) as store:
        session = _session(run, store)
        return bench_store(store, session, options, events)


def _show_fusion(run: Run, result: Mapping[str, Any]) -> None:
    from samples.benchmarks.bench.fusion import fusion_notes, fusion_tables

    for table in fusion_tables(result):
        run.out.table(table.head, table.rows, title=table.title)
        run.out.print()
    for line in fusion_notes(result):
        run.out.print(line)


@app.command()
@takes(
    DecodeBenchOptions,
    ModelOptions,
)
def decode(run: Run) -> None:
    """Measure the speed of decoding after a prompt.

    Compiled decoding and the model's own forward take turns, token by token, next to a plain copy in the same run.
    The model is smollm2 unless --model or --shape names another.
    """
    import torch

    from samples.benchmarks.bench.decode import DecodeOptions, bench_decode

    wanted = run.get(DecodeBenchOptions)
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    options = DecodeOptions(wanted.context, wanted.new_tokens, wanted.stepper)
    decoder = _decoder(run, wanted.shape)
    with run.out.progress("measure", total=options.new_tokens, unit="steps") as bar:
        result = bench_decode(decoder, options, Events(advance=bar.advance))
    for note in result["notes"]:
        run.out.warning(note)
    run.out.result(result, human=lambda: _show_decode(run, result))


def _decoder(run: Run, shape: str | None) -> Decoder:
    from kvtool.core.checkpoint.hub import resolve
    from kvtool.core.checkpoint.load import load_model
    from kvtool.core.kernels.linear.modules import pack_weights
    from kvtool.core.model.decoder import Decoder
    from samples.benchmarks.bench.shapes import build_shape

    wanted = run.get(ModelOptions)
    run.out.doing(f"loading {shape or wanted.model or PACKAGED}")
    if shape is None:
        files = resolve(wanted.model or PACKAGED, offline=wanted.offline)
        # Built by transformers, whose own forward is measured, too.
        return Decoder(load_model(files, device=wanted.device, dtype=wanted.dtype, packed=True, listed=False))
    loaded = build_shape(shape, wanted.device, wanted.dtype)
    pack_weights(loaded.model)
    return Decoder(loaded)


def _show_decode(run: Run, result: Mapping[str, Any]) -> None:
    rows = [
        (
            *(row["stepper"], f"{row['tokens_per_second']:.1f}", f"{row['step_ms']:.2f}"),
            *(f"{row['step_cpu_ms']:.2f}", f"{row['first_step_ms']:.1f}"),
            "-" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.1f}",
            "-" if row["copy_share"] is None else f"{row['copy_share']:.2f}",
        )
        for row in result["rows"]
    ]
    run.out.table(("stepper", "tokens/s", "ms", "CPU ms", "first ms", "GB/s read", "of a copy's"), rows)
    model, _, dtype = result["resolved"].values()
    run.out.print(
        f"{model} in {dtype}, {result['context']} tokens before {result['new_tokens']} steps; "
        f"a copy reads and writes {2 * result['memcpy_bytes_per_s'] / 1e9:.1f} GB/s; {result['includes']}"
    )
    if result["make_ms"] is not None:
        run.out.print(
            f"machine code for {result['isa']}, made in {result['make_ms']:.0f} ms; "
            f"weights {', '.join(result['matrices'])}, {result['weights_bytes'] / 1e6:.0f} MB"
        )
    if result["kl_max"] is not None:
        run.out.print(f"logits: KL {result['kl_max']:.1e} nats at most, difference {result['apart_max']:.1e} at most")
    _show_host(run, result)


if __name__ == "__main__":
    sys.exit(main(commands=app, program="bench"))
