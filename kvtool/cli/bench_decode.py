"""`kvtool bench decode`: answers, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.core.checkpoint.files import PACKAGED
from kvtool.core.common.progress import Events
from kvtool.core.model.options import ModelOptions
from kvtool.lab.bench.options import DecodeBenchOptions

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.lab.bench.decode import DecodeBench, StepperRow


@takes(
    DecodeBenchOptions,
    ModelOptions,
    examples=(
        "bench decode",
        "bench decode --shape qwen2.5-0.5b --context 8192 --stepper native",
    ),
)
def decode(run: Run) -> None:
    """How fast answers are decoded behind a prompt, and by what parts.

    The steps in machine code beside the model's own forward, token by token in turn, and a plain copy in the same run.
    The model is smollm2 unless --model or --shape names another.
    """
    import torch

    from kvtool.lab.bench.decode import DecodeOptions, bench_decode

    wanted = run.get(DecodeBenchOptions)
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    options = DecodeOptions(wanted.context, wanted.new_tokens, wanted.stepper)
    decoder = _decoder(run, wanted.shape)
    with run.out.progress("measure", total=options.new_tokens, unit="steps") as bar:
        result = bench_decode(decoder, options, Events(status=bar.describe, advance=bar.advance))
    for note in result.notes:
        run.out.warning(note)
    run.out.result(result.to_json(), human=lambda: _show(run, result))


def _decoder(run: Run, shape: str | None) -> Decoder:
    from kvtool.core.checkpoint.hub import resolve
    from kvtool.core.checkpoint.load import load_model
    from kvtool.core.kernels.linear.onednn import pack_weights
    from kvtool.core.model.decoder import Decoder
    from kvtool.lab.bench.shapes import build_shape

    wanted = run.get(ModelOptions)
    run.out.doing(f"loading {shape or wanted.model or PACKAGED}")
    if shape is None:
        files = resolve(wanted.model or PACKAGED, offline=wanted.offline)
        return Decoder(load_model(files, device=wanted.device, dtype=wanted.dtype, packed=True))
    loaded = build_shape(shape, wanted.device, wanted.dtype)
    pack_weights(loaded.model)
    return Decoder(loaded)


def _show(run: Run, result: DecodeBench) -> None:
    rows = [
        (
            row.stepper,
            f"{row.tokens_per_second:.1f}",
            f"{row.step_ms:.2f}",
            f"{row.step_cpu_ms:.2f}",
            f"{row.first_step_ms:.1f}",
            *_read(row),
        )
        for row in result.rows
    ]
    run.out.table(("stepper", "tokens/s", "ms", "CPU ms", "first ms", *_READ), rows)
    if result.parts:
        run.out.table(
            ("part", "ms", "MB"), [(p.part, f"{p.part_ms:.2f}", f"{p.bytes_read / 1e6:.1f}") for p in result.parts]
        )
    for line in _notes(result):
        run.out.print(line)


_READ = ("GB/s read", "of a copy's")


def _read(row: StepperRow) -> tuple[str, str]:
    if row.bytes_per_s is None or row.copy_share is None:
        return "-", "-"
    return f"{row.bytes_per_s / 1e9:.1f}", f"{row.copy_share:.2f}"


def _notes(result: DecodeBench) -> list[str]:
    lines = [
        f"{result.model} in {result.dtype}, {result.context} tokens before {result.new_tokens} steps; "
        f"a copy reads and writes {2 * result.memcpy_bytes_per_s / 1e9:.1f} GB/s; {result.includes}"
    ]
    if result.make_ms is not None and result.weights_bytes is not None:
        lines.append(
            f"machine code for {result.isa}, made in {result.make_ms:.0f} ms; weights {', '.join(result.matrices)}, "
            f"{result.weights_bytes / 1e6:.0f} MB"
        )
    if result.kl_max is not None:
        lines.append(f"logits: KL {result.kl_max:.1e} nats at most, {result.apart_max:.1e} apart")
    return [*lines, result.host.line()]
