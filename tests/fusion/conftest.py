from __future__ import annotations

import pytest

from kvtool.core.fusion.plan import Plan
from tests.fusion.launching import Kernel
from tests.fusion.making import BOS, Case, case
from tests.pretended.streams import Log


@pytest.fixture(scope="session")
def llama() -> Case:
    return case("llama")


@pytest.fixture
def plan(llama: Case) -> Plan:
    """Chunks stored after another lead-in, so none of them is exact."""
    return llama.plan(lead_in=BOS)


@pytest.fixture
def kernel(gpu: Log, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel.instead(monkeypatch)
