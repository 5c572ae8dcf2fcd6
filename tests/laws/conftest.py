"""The laws of `kvtool help design`, over every registered selector × every family × float32 and bfloat16."""

from __future__ import annotations

import pytest

from tests.fusion.making import DTYPES, NAMES, Case
from tests.fusion.making import case as shared_case

FAMILIES = (*NAMES, "gpt-neox")  # whose heads have keys of their own each


@pytest.fixture(params=[(name, dtype) for dtype in DTYPES for name in FAMILIES], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    """Every family in both dtypes; shared between tests, so it must be left whole."""
    return shared_case(*request.param)
