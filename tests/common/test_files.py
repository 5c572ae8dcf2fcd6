"""Only regular files are opened by paths that come from others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtool.core.common.files import open_regular, read_regular
from tests.wording import refused


def test_a_file_and_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "a", 100) == read_regular(tmp_path / "link", 10) == b"0123456789"
    assert read_regular(tmp_path / "a", 4) == b"0123"
    assert read_regular(tmp_path / "a", 0) == b""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "a").write_bytes(b"")
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with refused(OSError):
            open_regular(path)
    status = os.stat(tmp_path / "a")
    monkeypatch.setattr(os, "stat", lambda path: status)  # a FIFO takes the place of a file that was looked at
    with refused(OSError):
        open_regular(tmp_path / "fifo")
    if handles:
        assert len(os.listdir("/proc/self/fd")) == handles
