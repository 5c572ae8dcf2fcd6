"""`stream.py`: what it says, what it draws, and what it refuses."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.session.identity import MeasuredLosses
from samples.benchmarks import stream
from tests.cli.working import kvtool, script

SHAPE = ("--shape", "qwen2.5-0.5b", "--context", "3000", "--slo-ms", "100,400")
PREFILL = ("--prefill-tokens-per-second", "5000")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "drop.csv"
    path.write_text("# class: mine\n# latency_ms: 5\nseconds,mbps\n0,500\n0.05,100\n", encoding="utf-8")
    return path


def test_json_holds_rows_by_class_and_objective(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "steady.csv"
    other.write_text("0,300\n", encoding="utf-8")
    found = script(stream.main, *SHAPE, "--trace", trace, "--trace", other, "--json").fine().json
    assert [(one["name"], one["class"]) for one in found["traces"]] == [("drop", "mine"), ("steady", "file")]
    assert (found["tokens"], found["chunks"]) == (3000, 2)
    policies = ["adaptive", "link", "cachegen", "4", "3", "2", "1", "int8", "lossless", "raw", "text"]
    classes = ["all", "mine", "file"]
    rows = [(row["policy"], row["class"], row["slo_ms"]) for row in found["rows"]]
    assert rows == [(p, c, slo) for p in policies for c in classes for slo in (None, 100.0, 400.0)]
    for row in found["rows"]:
        assert row["requests"] == (2 if row["class"] == "all" else 1) * (2 if row["slo_ms"] is None else 1)
        assert 0 <= row["met_share"] <= 1
    run = next(run for run in found["case"]["runs"] if run["policy"] == "adaptive")
    decisions = [row for row in run["stream"] if row["decision"] in ("base", "refinement")]
    assert len(decisions) == len(run["arrivals"])
    assert {"chunk", "level", "estimated_mbps", "measured_mbps", "fetch_ms"} <= set(run["stream"][0])


def test_the_table_and_three_figures(trace: Path, tmp_path: Path) -> None:
    done = script(
        stream.main, *SHAPE, "--trace", trace, "--plot", tmp_path / "s.svg", "--margin", "0", "--predictor", "last"
    ).fine()
    assert "adaptive" in done.out
    assert "context ready over 3 Gbit/s" in done.out
    assert "decoding is not counted" in done.out
    for name in ("s.svg", "s-classes.svg", "s-drop.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_given_speeds_replace_the_gpus(trace: Path) -> None:
    more = ("--trace", trace, "--decode-gb-per-s", "2", *PREFILL, "--json")
    found = script(stream.main, *SHAPE, *more).fine().json
    assert found["text_ms"] == pytest.approx(600)
    assert "prefill 5000 tokens/s, as given" in found["sources"]
    assert "decoding to 2 GB/s of KV, as given" in found["sources"]
    slower = script(stream.main, *SHAPE, "--trace", trace, "--gpu", "a40", "--json").fine().json
    faster = script(stream.main, *SHAPE, "--trace", trace, "--json").fine().json
    assert slower["text_ms"] == pytest.approx(faster["text_ms"] * 312 / 149.7)


def test_a_store_has_its_own_sizes_and_losses(plain: Path, trace: Path) -> None:
    kvtool("compress", "--store", plain, "--fit", "--level", "2", "4", "--questions", "2").fine()
    found = script(stream.main, "--store", plain, "--trace", trace, *PREFILL, "--json").fine().json
    assert {row["policy"] for row in found["rows"]} == {"adaptive", "link", "cachegen", "4", "2", "raw", "text"}
    losses = {row["policy"]: row["kl_answer"] for row in found["rows"]}
    with Store.open(plain) as store:
        assert {level: losses[level] for level in ("2", "4")} == pytest.approx(MeasuredLosses(store).at_most())
        chunks = {ref.chunk_id for document in store.documents() for ref in document.chunks}
        sizes = [store.level_sizes(chunk) for chunk in chunks]
    assert found["chunks"] == len(chunks)
    read = {row["policy"]: row["bytes_read"] for row in found["rows"]}
    assert read["raw"] == pytest.approx(sum(one["raw"] for one in sizes))
    assert read["4"] == pytest.approx(sum(one["4"] for one in sizes))
    assert found["raw_bytes"] <= sum(one["raw"] for one in sizes) < 1.5 * found["raw_bytes"]  # records have headers
