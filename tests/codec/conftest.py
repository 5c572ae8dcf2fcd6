"""A process in which Triton's kernels run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.codec.processes import triton_process


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Runs what is submitted under `TRITON_INTERPRET=1`."""
    with triton_process(tmp_path_factory.mktemp("triton"), "1") as process:
        yield process
