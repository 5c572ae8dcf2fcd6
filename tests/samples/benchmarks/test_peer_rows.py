"""Rows, tables and the chart of `peers.py`, from invented measurements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvtool.core.checkpoint.files import ModelFiles
from samples.benchmarks.peers import TABLE_HEAD, peers_chart, peers_notes, peers_table, stored_table
from samples.benchmarks.systems.job import Found, Run, llama_contenders, runs
from samples.benchmarks.systems.rows import PeersBench, gathered
from samples.benchmarks.systems.task import LLAMA, LLAMA_DEFAULT, Contender
from tests.samples.benchmarks.fabricated import HOST, STORED, TRIED, contenders, measured, options


@pytest.fixture
def bench() -> PeersBench:
    asked = options(contexts=(1000, 4000), repeat=3)
    made = [
        Run(contender, context, number, measured(contender, context, late))
        for context in asked.contexts
        for contender in contenders()
        for number, late in enumerate((0.0, 9.0, 1.0))
    ]
    files = ModelFiles("tiny", Path(), "folder")
    return gathered(
        Found(files, "float32", tuple(made), HOST, tuple(STORED), {"context": 1000, "rows": TRIED}), asked, 2
    )


def test_llama_cpp_runs_as_it_comes_and_with_the_quickest_settings_with_and_without_flash_attention() -> None:
    found = llama_contenders(TRIED)
    assert [(one.ubatch, one.flash) for one in found] == [(512, "auto"), (128, "on"), (512, "off")]
    assert [one.name for one in found] == [LLAMA_DEFAULT, "llama.cpp, -ub 128 -fa on", "llama.cpp, -ub 512 -fa off"]
    assert runs(options(repeat=2)) == 2 * len(contenders())


def test_times_are_medians_and_speeds_follow_from_them(bench: PeersBench) -> None:
    rows = {(row.contender, row.context): row for row in bench.rows}
    full, union = rows["kvtool full", 1000], rows["kvtool union", 1000]
    assert (full.count, full.ttft_ms) == (3, 401.0)
    assert full.prefill_tokens_per_second == pytest.approx(1000 / 0.401)
    assert full.decode_tokens_per_second == pytest.approx(4 / 0.04)
    quickest = rows["llama.cpp, -ub 128 -fa on", 1000].ttft_ms
    assert union.speedup == pytest.approx(quickest / 201.0)
    assert union.efficiency == pytest.approx((401.0 / 201.0) / (1000 / 250))
    assert rows["transformers", 1000].efficiency is None
    assert rows["transformers", 1000].flops is None


def test_a_saved_state_stands_with_its_contender(bench: PeersBench) -> None:
    row = next(row for row in bench.rows if row.kind == LLAMA and row.context == 4000)
    assert row.saved is not None
    assert row.saved["ttft_ms"] == 81.0
    assert row.saved["bytes_per_token"] == pytest.approx(23_000 * 4000 / 3968)
    assert all(row.saved is None for row in bench.rows if row.kind != LLAMA)


def test_tokens_are_compared_with_those_of_kvtools_full_prefill(bench: PeersBench) -> None:
    assert {row.kind: row.same_tokens for row in bench.rows} == {"llama.cpp": 3, "transformers": 5, "kvtool": 5}


def test_without_llama_cpp_there_is_nothing_to_be_quicker_than() -> None:
    asked = options(peers=())
    mine = [Run(each, 1000, 0, measured(each)) for each in contenders() if each.kind == "kvtool"]
    bench = gathered(Found(ModelFiles("tiny", Path(), "folder"), "float32", tuple(mine), HOST, (), {}), asked, 2)
    assert {row.speedup for row in bench.rows} == {None}
    assert bench.tuning is None
    assert len(list(peers_table(bench))) == len(mine)


def test_tables_and_notes_for_people(bench: PeersBench) -> None:
    table = list(peers_table(bench))
    assert {len(row) for row in table} == {len(TABLE_HEAD)}
    assert len(table) == len(bench.rows) + 2 * 3  # a saved state of each of llama.cpp's three settings
    assert [row[0] for row in stored_table(bench)] == ["kvtool raw", "kvtool 2", "llama.cpp, saved state"]
    said = "\n".join(peers_notes(bench))
    for words in ("AVX2 = 1", "float16", "page cache", "resident memory", "speedup"):
        assert words in said
    assert said.count("AVX2 = 1") == 3  # one line a kind, not one a setting


def test_the_chart_shows_the_quickest_of_llama_cpps_settings(bench: PeersBench) -> None:
    titles = [
        title.text for title in ElementTree.fromstring(peers_chart(bench)).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert "llama.cpp: 1.129" in titles
    assert "llama.cpp, saved state: 0.081" in titles
    assert len(titles) == 2 * 7  # llama.cpp, its saved state, transformers, four modes


def test_a_name_tells_contenders_apart() -> None:
    assert len({each.name for each in contenders()}) == len(contenders())
    assert Contender(LLAMA, ubatch=512, flash="on").name != LLAMA_DEFAULT
