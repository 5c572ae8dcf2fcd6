"""Every back-end this machine has, one after another."""

from __future__ import annotations

import pytest

from kvtool.core.codec.rans import coder


@pytest.fixture(params=coder.available())
def back_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the coder use it."""
    name = str(request.param)
    monkeypatch.setenv(coder.VARIABLE, name)
    return name
