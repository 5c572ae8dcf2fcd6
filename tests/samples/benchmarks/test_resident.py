"""The kernel's book of this process's memory."""

from __future__ import annotations

import mmap

import pytest

from samples.benchmarks.systems import child as resident


@pytest.mark.skipif(resident.resident() is None, reason="no /proc here")
def test_a_peak_begins_anew() -> None:
    size = 2**26
    with mmap.mmap(-1, size) as held:  # an allocator may keep what is freed
        held.write(b"x" * size)
        before = resident.peak_resident()
    resident.reset_peak()
    after, now = resident.peak_resident(), resident.resident()
    assert before is not None
    assert after is not None
    assert now is not None
    assert after <= before - size // 2
    assert abs(after - now) < 2**22


def test_where_the_kernel_tells_nothing_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    monkeypatch.setattr(resident, "_STATUS", Path(str(tmp_path)) / "none")
    monkeypatch.setattr(resident, "_CLEAR", Path(str(tmp_path)))
    resident.reset_peak()
    assert resident.resident() is resident.peak_resident() is resident.mapped() is None
