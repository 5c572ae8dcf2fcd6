"""Records decoded by the Triton kernel (interpreted on the CPU) are those that the CPU's own coder gives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.backend import GpuBackend
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.codec.transform import decodes_there
from kvtool.core.errors import DamagedError
from tests.codec.processes import needs_triton
from tests.codec.synthetic import KV, Model, changed, encoded, model, numbers_of, profile, relative, shelf

pytestmark = needs_triton
CPU = torch.device("cpu")


def on_device(items: list[Encoded], level: str, data: bytes) -> tuple[np.ndarray, list[list[torch.Tensor]]]:
    """The whole numbers of all records, and their keys and values; runs in the interpreter's process."""
    of = Profile.from_bytes(data)
    return numbers_of(items, of, GpuBackend(CPU)), CODECS[level].decode(items, 0, shelf(of), CPU)


def check(interpreter: ProcessPoolExecutor, items: Sequence[Encoded], level: str, of: Profile) -> None:
    """The same numbers, hence the same tensors but for the order of sums."""
    numbers, pairs = interpreter.submit(on_device, list(items), level, of.data).result()
    assert np.array_equal(numbers, numbers_of(items, of))
    for ours, pair in zip(pairs, CODECS[level].decode(items, 0, shelf(of)), strict=True):
        for mine, side in zip(ours, pair, strict=True):
            assert mine.dtype == side.dtype
            assert relative(mine, side) < (1e-6 if side.dtype == torch.float32 else 0.004)


def outlying(tokens: int) -> KV:
    keys, values = model().kv(0, tokens)
    keys[0, 3] += 400.0
    return keys, values


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_that_stand_alone(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    of = profile()
    items = [encoded(*model().kv(0, tokens, dtype=dtype), ["2"], of)["2"] for tokens in (3, 8, 1)]
    check(interpreter, items, "2", of)


@pytest.mark.slow
def test_escapes_go_to_their_own_rows(interpreter: ProcessPoolExecutor) -> None:
    of = profile()
    items = [encoded(*kv, ["1"], of)["1"] for kv in (outlying(6), model().kv(0, 4), outlying(9))]
    marked = [len(Record.parse(item.payload).escapes.marked) for item in items]
    assert marked[0]
    assert marked[2]
    check(interpreter, items, "1", of)


@pytest.mark.slow
def test_records_that_refine_others(interpreter: ProcessPoolExecutor) -> None:
    of = profile()
    chain = encoded(*model().kv(0, 5), ["1", "2", "3"], of)["1"]
    alone = encoded(*outlying(6), ["1"], of)["1"]
    assert chain.base is not None
    assert alone.base is None
    check(interpreter, [alone, chain], "1", of)


def test_columns_that_are_not_coded(interpreter: ProcessPoolExecutor) -> None:
    of = profile(2, 64, 20, 2)
    kvs = [Model(2, 64, seed=1).kv(0, tokens, seed=tokens) for tokens in (2, 3)]
    items = [encoded(*kv, ["1"], of)["1"] for kv in kvs]
    assert all(len(Record.parse(item.payload).escapes.places) for item in items)
    check(interpreter, items, "1", of)


@pytest.mark.slow
def test_marks_that_are_not_those_of_the_stream(interpreter: ProcessPoolExecutor) -> None:
    of = profile()
    item = encoded(*outlying(5), ["1"], of)["1"]
    escapes, outside = Record.parse(item.payload).escapes, np.array([5 * 128], np.uint32)
    for wrong in (
        replace(escapes, marked=escapes.marked[:-1]),
        replace(escapes, marked=np.append(escapes.marked, np.int16(1))),
        replace(escapes, places=outside, placed=np.array([1], np.int16)),
    ):
        with pytest.raises(DamagedError):
            interpreter.submit(on_device, [changed(item, escapes=wrong)], "1", of.data).result()


def test_only_cuda_decodes() -> None:
    assert not decodes_there("cpu")
    assert not decodes_there("mps")
    assert decodes_there("cuda:0")
