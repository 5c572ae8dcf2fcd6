from __future__ import annotations

import pytest

from tests.fusion.launching import Kernel
from tests.fusion.making import Case, case
from tests.pretended.streams import Log


@pytest.fixture(scope="session")
def llama() -> Case:
    return case("llama")


@pytest.fixture
def kernel(gpu: Log, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel.instead(monkeypatch)
