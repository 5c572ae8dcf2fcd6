"""The laws of DESIGN.md, over every registered selector × every family × float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fusion.making import DTYPES, NAMES, Case
from tests.fusion.making import case as shared_case


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are fastest so, and it is what the tolerances were measured with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[(name, dtype) for dtype in DTYPES for name in NAMES], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    """Every family in both dtypes; shared between tests, so it must be left whole."""
    return shared_case(*request.param)
