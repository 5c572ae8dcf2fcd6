"""The Triton kernel against the reference: in triton's interpreter, and compiled for the GPUs it is meant for."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from kvtool.core.codec.rans import triton as coder
from kvtool.core.codec.rans.tables import Columns, Stream
from kvtool.core.codec.rans.triton import CudaDecoding, decode_batch_cuda
from kvtool.core.errors import DamagedError, KvtoolError
from tests.codec.processes import compile_for_cuda, needs_triton
from tests.codec.rans.reference import decode, encode
from tests.codec.rans.streams import TERNARY, symbols_for, table_set
from tests.wording import refused

GAP = -77
CPU = torch.device("cpu")


def decoded(jobs: list[CudaDecoding]) -> list[torch.Tensor]:
    """What the jobs leave in their outputs; runs in the interpreter's process."""
    decode_batch_cuda(jobs, CPU)
    return [job.out for job in jobs]


def compiled(capability: int, refine: bool, ballot: bool) -> tuple[str, str, int]:
    """TTGIR, PTX and size of the machine code for a GPU that need not be here; runs in a process that compiles."""
    types, constants = {"descriptors": "*i64", "ends": "*i32"}, coder.constants(refine, ballot)
    built = compile_for_cuda(coder._kernel(), capability, types, constants, num_warps=1)
    return built.asm["ttgir"], built.asm["ptx"], len(built.asm["cubin"])


def _job(rng: np.random.Generator, rows: int, columns: int, refine: bool = False) -> tuple[CudaDecoding, torch.Tensor]:
    """A job with gaps in its output, and what the reference makes of it."""
    tables = TERNARY if refine else table_set(int(rng.integers(99)))
    ids = rng.integers(0, len(tables) - 2, columns).astype(np.uint16)
    coarse = rng.integers(-4, 5, (rows, columns))
    contexts = np.minimum(np.abs(coarse), 2).astype(np.uint8) if refine else None
    symbols = symbols_for(
        tables, np.broadcast_to(ids.astype(np.int64), coarse.shape) + (contexts if refine else 0), rng
    )
    stream = encode(symbols, ids, tables, contexts)
    numbers = decode(stream, rows, ids, tables, contexts).astype(np.int64) - 128
    groups = columns // 32
    places = (rng.permutation(groups + 2)[:groups] * 40 + 3).astype(np.int32)
    at = (places[:, None] + np.arange(32)).reshape(-1)
    out = torch.full((rows, (groups + 2) * 40 + 8), GAP, dtype=torch.int16)
    expected = out.clone()
    if refine:
        out[:, at] = torch.from_numpy(coarse).to(torch.int16)
        numbers = 3 * coarse + np.where(coarse < 0, -numbers, numbers)
    expected[:, at] = torch.from_numpy(numbers).to(torch.int16)
    return CudaDecoding(stream, Columns(ids, tables, places, refine), out), expected


@pytest.mark.some(1)
@needs_triton
@pytest.mark.parametrize(("rows", "columns"), [(5, 64), (3, 128), (1, 192)])
def test_what_the_reference_decodes(interpreter: ProcessPoolExecutor, rows: int, columns: int) -> None:
    job, expected = _job(np.random.default_rng(rows), rows, columns)
    (out,) = interpreter.submit(decoded, [job]).result()
    assert torch.equal(out, expected)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("refine", [False, True])
def test_a_batch_of_streams_of_different_sizes(interpreter: ProcessPoolExecutor, refine: bool) -> None:
    rng = np.random.default_rng(1)
    shapes = [(10, 128), (18, 64), (0, 64), (1, 0), (2, 64)]
    jobs, expected = zip(*[_job(rng, *shape, refine=refine) for shape in shapes], strict=True)
    assert min(len(job.stream.words) for job in jobs[:2]) > 3  # a lane's state itself holds its first 16 bits
    outs = interpreter.submit(decoded, list(jobs)).result()
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


@needs_triton
def test_table_sets_may_be_mixed_and_an_output_shared(interpreter: ProcessPoolExecutor) -> None:
    rng = np.random.default_rng(2)
    (whole, whole_expected), (second, second_expected) = _job(rng, 3, 64), _job(rng, 3, 64)
    width = whole.out.shape[1]
    shared = torch.full((3, 2 * width), GAP, dtype=torch.int16)
    beside = dataclasses.replace(whole.columns, places=whole.columns.places + np.int32(width))
    other = dataclasses.replace(whole, out=shared, columns=beside)  # decoded next to the first, into the same matrix
    whole = dataclasses.replace(whole, out=shared[:, :width])
    outs = interpreter.submit(decoded, [whole, second, other]).result()
    assert torch.equal(outs[0], whole_expected)
    assert torch.equal(outs[2][:, width:], whole_expected)
    assert torch.equal(outs[1], second_expected)


HOSTILE: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "no words": lambda words, states: (words[:0], states),
    "a word short": lambda words, states: (words[:-1], states),
    "a word too many": lambda words, states: (np.append(words, np.uint16(7)), states),
    "a flipped state": lambda words, states: (words, states ^ (np.arange(64) == 63).astype(np.uint32) * (1 << 20)),
    "states of nothing": lambda words, states: (words, states * np.uint32(0)),
    "a flipped word": lambda words, states: (words ^ (np.arange(len(words)) == len(words) // 2), states),
}


@pytest.mark.some(2)
@needs_triton
@pytest.mark.parametrize(
    ("how", "refine"), [*((how, False) for how in HOSTILE), ("a word short", True), ("a flipped state", True)]
)
def test_a_hostile_stream_is_refused(interpreter: ProcessPoolExecutor, how: str, refine: bool) -> None:
    rng = np.random.default_rng(3)
    (good, _), (bad, _) = _job(rng, 1, 64, refine=refine), _job(rng, 20 if refine else 4, 64, refine=refine)
    assert len(bad.stream.words) > 3
    words, states = HOSTILE[how](bad.stream.words, bad.stream.states)
    bad = dataclasses.replace(bad, stream=Stream.of(words.astype(np.uint16), states.astype(np.uint32)))
    with pytest.raises(DamagedError):
        interpreter.submit(decoded, [good, bad]).result()


def test_a_job_that_does_not_fit_is_refused_before_anything_runs() -> None:
    job, _ = _job(np.random.default_rng(4), 2, 64)
    misfits: list[CudaDecoding] = [
        dataclasses.replace(job, out=job.out.float()),
        dataclasses.replace(job, out=job.out.half()),
        dataclasses.replace(job, out=job.out.T.contiguous().T),
        dataclasses.replace(job, out=job.out[None]),
        dataclasses.replace(job, columns=dataclasses.replace(job.columns, places=job.columns.places + np.int32(140))),
    ]
    for misfit in misfits:
        with pytest.raises(ValueError):
            decode_batch_cuda([misfit], CPU)
    refining, _ = _job(np.random.default_rng(4), 2, 64, refine=True)
    with refused(ValueError):
        decode_batch_cuda([job, refining], CPU)


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    coder._kernel.cache_clear()
    job, _ = _job(np.random.default_rng(5), 1, 64)
    with refused(KvtoolError):
        decode_batch_cuda([job], CPU)


@pytest.mark.slow
@needs_triton
def test_it_compiles_for_sm_80_and_sm_90(compiler: ProcessPoolExecutor) -> None:
    for capability in (80, 90):
        for refine, ballot in ((False, True), (True, True), (False, False)):
            ttgir, ptx, size = compiler.submit(compiled, capability, refine, ballot).result()
            assert f".target sm_{capability}" in ptx
            assert size > 0
            assert ("vote.sync.ballot" in ptx) == ballot
            # A lane a thread: what the ballots count on.
            layouts = set(re.findall(r"#ttg\.blocked<\{(.*?)\}>", ttgir))
            assert layouts == {"sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [1], order = [0]"}
