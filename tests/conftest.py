"""What every test gets: a home of its own, so that none touches the user's, and no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All state under a temporary folder, no setting from outside."""
    for variable in [name for name in os.environ if name.startswith("KVTOOL_") and "_TEST_" not in name]:
        monkeypatch.delenv(variable)
    folder = tmp_path / "home"
    monkeypatch.setenv("KVTOOL_HOME", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    return folder
