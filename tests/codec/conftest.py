"""A process in which Triton's kernels run on the CPU, and every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvtool.core.native import isa as isas
from kvtool.core.native.isa import runnable
from tests.codec.processes import triton_process


@pytest.fixture(params=runnable())
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the codec use one instruction set after another."""
    name = str(request.param)
    monkeypatch.setattr(isas, "runnable", lambda: (name,))
    return name


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Runs what is submitted under `TRITON_INTERPRET=1`."""
    with triton_process(tmp_path_factory.mktemp("triton"), "1") as process:
        yield process
