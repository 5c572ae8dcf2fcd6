"""Traces, their files, and those that are generated."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings

from samples.benchmarks.streaming.traces import LinkTrace, drop_in_mid_transfer, generate, read_trace, write_trace
from tests.streaming.making import traces


def test_the_generated_ones_are_many_and_come_back_from_their_files(tmp_path: Path) -> None:
    found = generate()
    assert len(found) >= 20
    assert len({one.name for one in found}) == len(found)
    assert min(Counter(one.kind for one in found).values()) >= 3
    assert found == generate()
    rates = [mbps for one in found if one.kind == "steady" for _, mbps in one.steps]
    assert (min(rates), max(rates)) == (100, 10_000)
    assert drop_in_mid_transfer() in found
    for one in found:
        write_trace(one, tmp_path / "trace.csv")
        back = read_trace(tmp_path / "trace.csv")
        assert (back.name, back.kind, back.seed) == (one.name, one.kind, one.seed)
        assert [rate for _, rate in back.steps] == pytest.approx([rate for _, rate in one.steps], rel=1e-4)


@settings(max_examples=50, deadline=None)
@given(traces())
def test_a_trace_comes_back_as_written(one: LinkTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_trace(one, path)
        assert read_trace(path) == one


def test_rows_alone_are_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0, 3000\n\n0.5,1000\n", encoding="utf-8")
    assert read_trace(path) == LinkTrace("mine", "file", ((0.0, 3000.0), (0.5, 1000.0)))
