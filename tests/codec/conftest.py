"""Every instruction set that this machine has."""

from __future__ import annotations

import pytest

from kvtool.core.native import isa as isas
from kvtool.core.native.isa import runnable


@pytest.fixture(params=runnable())
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setattr(isas, "runnable", lambda: (name,))
    return name
