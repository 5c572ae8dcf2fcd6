"""`samples.benchmarks.bench decode` says what it measured; how fast that was is no test's business."""

from __future__ import annotations

import pytest

from tests.samples.benchmarks.benching import run_bench

TINY = ("decode", "--shape", "tiny", "--dtype", "float32", "--context", "40", "--new-tokens", "3")


@pytest.mark.slow
def test_both_steppers_and_the_parts_of_a_token() -> None:
    found = run_bench(*TINY, "--threads", "1", "--json").fine().json
    assert [row["stepper"] for row in found["rows"]] == ["native", "torch"]
    assert [part["part"] for part in found["parts"]] == ["products", "attention", "rest"]
    assert found["matrices"] == ["float32"]
    assert found["weights_bytes"] == 4 * (4 * 36864 + 64 * 512)  # of the tiny shape, see test_flops.py
    assert found["kl_max"] < 1e-9
    assert found["apart_max"] < 1e-3
    assert found["rows"][1]["bytes_per_s"] is None
