"""Advice to install a package: the command installs it where kvtool is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvtool.core.common.installing import extra_line, install_line


@pytest.mark.parametrize(
    ("left_behind", "told"),
    [
        (None, "{python} -m pip install"),
        ("bin/pip", "pip install"),
        ("pipx_metadata.json", "pipx runpip kvtool-cpu install"),
        ("uv-receipt.toml", "uv pip install --python '{home}'"),
    ],
)
def test_the_line_that_is_told_installs_where_kvtool_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_behind: str | None, told: str
) -> None:
    home = tmp_path / "my tools" / "kvtool-cpu"  # pipx's --suffix
    home.mkdir(parents=True)
    if left_behind:
        (home / left_behind).parent.mkdir(exist_ok=True)
        (home / left_behind).touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(home))
    monkeypatch.setenv("PATH", str(home / "bin"))
    told = told.format(home=home, python=sys.executable)
    assert install_line("--no-deps", "wanted==1") == f"{told} --no-deps wanted==1"
    assert extra_line("serve") == f"{told} 'kvtool[serve]'"
