from __future__ import annotations

import pytest

from tests.fusion.launching import Kernel
from tests.pretended.streams import Log


@pytest.fixture
def kernel(gpu: Log, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A substitute for the kernel that places a layer, on a GPU that is not there."""
    return Kernel.instead(monkeypatch)
