"""The peak of memory that a computation or a process takes."""

from __future__ import annotations

import mmap

import pytest
import torch

from samples.benchmarks.peak_memory import own_pages, peak_memory
from samples.benchmarks.systems import child as resident


@pytest.mark.skipif(own_pages() is None, reason="no /proc here")
def test_the_peak_of_memory_is_seen_although_it_is_given_back() -> None:
    with peak_memory("cpu") as peak:
        held = torch.ones(2**25)  # 128 MiB
        del held
    assert peak.bytes is not None
    with peak_memory("cpu") as kept:
        still = torch.ones(2**25)
    assert kept.bytes is not None
    assert kept.bytes >= 0.9 * still.nbytes


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
