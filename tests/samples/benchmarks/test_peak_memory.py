"""The peak of memory that a computation takes."""

from __future__ import annotations

import pytest
import torch

from samples.benchmarks.peak_memory import own_pages, peak_memory


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
