"""samples/tools/slow_disk.py: what is expected of an 8B model and a disk slower than its prefill."""

from __future__ import annotations

import pytest

from samples.tools import slow_disk


def test_full_prefill_is_as_measured() -> None:
    """samples/results/gpu.md: 551 ms."""
    assert slow_disk.expected("full", "raw") == pytest.approx(0.551, rel=0.02)


@pytest.mark.parametrize("mode", ["reuse", "epic", "blend"])
def test_a_level_makes_reading_faster_than_computing(mode: str) -> None:
    full = slow_disk.expected("full", "raw")
    assert slow_disk.expected(mode, "raw") > 2 * full
    assert slow_disk.expected(mode, "2") < 0.5 * full


def test_auto_takes_a_level_and_says_what_each_would_take() -> None:
    found = slow_disk.decision()
    assert (found.fusion, found.level) == ("union", "3")
    assert found.expected_ms["union"] < 0.5 * found.expected_ms["full"]
    assert found.level_ms["3"] < found.level_ms["2"] < found.level_ms["1"] < found.level_ms["raw"]
    assert any("level 3 is read" in reason for reason in found.reasons)
