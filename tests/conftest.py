"""What every test gets: a home of its own, so that none touches the user's, and no network."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and what ignores it passes that on: Ctrl-C would then be tested in
# processes that cannot hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
