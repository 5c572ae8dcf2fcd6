"""`decoding.py`: several sequences in one step, against one sequence."""

from __future__ import annotations

from samples.benchmarks import decoding
from tests.cli.working import script

TINY = ("--shape", "tiny", "--dtype", "float32", "--context", "40", "--new-tokens", "3")


def test_several_sequences_at_once() -> None:
    found = script(decoding.main, *TINY, "--sequences", "2,5,2", "--json").fine().json
    assert [row["sequences"] for row in found["together"]] == [1, 2, 5]
    assert all(row["same_logits"] for row in found["together"])
    assert found["together"][0]["gain"] == 1
    assert script(decoding.main, *TINY, "--sequences", "3").fine().out.count("bit by bit") == 2
    script(decoding.main, *TINY, "--sequences", "0").failed(2, "--sequences")
