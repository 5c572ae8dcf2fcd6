"""`kvtool inspect plan`: what would be found, what it is worth; no model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.checkpoint import load
from kvtool.core.fusion.plan import LoadSpeed, PassSpeed
from kvtool.core.fusion.selectors import MODES
from kvtool.core.session import speeds
from tests.cli.working import QUESTION, SHORT, Done, chunks_of, drop_records, kvtool, payloads
from tests.families import save_tiny

PASS, LOAD = PassSpeed(fixed=0.0, row=1e-3, key=0.0), LoadSpeed(0.0, 1e-6, 1.0, 1e9)


def plan(store: Path, *more: object) -> Done:
    return kvtool("inspect", "plan", QUESTION, "--store", store, *more)


@pytest.fixture
def measured(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store for which this machine has been measured."""
    with monkeypatch.context() as patch:
        patch.setattr(speeds, "measure_pass", lambda *args: PASS)
        patch.setattr(speeds, "measure_load", lambda *args: LOAD)
        patch.setattr(speeds, "is_busy", lambda: False)
        kvtool("query", QUESTION, "--store", store, "--fusion", "auto", *SHORT).fine()
    return store


@pytest.fixture(autouse=True)
def no_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any load of a model fails, once the fixtures are done."""
    request.getfixturevalue("store")
    if "measured" in request.fixturenames:
        request.getfixturevalue("measured")
    monkeypatch.setattr(load, "load_model", None)


def test_what_a_query_would_find(store: Path) -> None:
    before = payloads(store)
    row = plan(store, "--json").fine().json
    assert {chunk["status"] for chunk in row["chunks"]} == {"hit"}
    assert {chunk["level"] for chunk in row["chunks"]} == {"raw"}
    assert all(chunk["bytes"] > 0 for chunk in row["chunks"])
    tokens = row["tokens"]
    assert tokens["reused"] - tokens["exact"] == sum(chunk["tokens"] for chunk in row["chunks"])
    assert (tokens["prompt"], tokens["miss"]) == (tokens["reused"] + tokens["fresh"], 0)
    assert not any("reason" in chunk for chunk in row["chunks"])
    assert row["expected_ms"] is None
    assert "has not been measured" in plan(store).fine().out
    assert payloads(store) == before


def test_what_would_be_missed_and_why(store: Path) -> None:
    chunk = chunks_of(store, "mill2.md")[1]
    drop_records(store, chunk)
    row = plan(store, "--documents", "mill2.md", "--json").fine().json
    assert [one["status"] for one in row["chunks"]].index("miss") == 1
    assert "not stored" in row["chunks"][1]["reason"]
    assert row["tokens"]["miss"] == row["chunks"][1]["tokens"]
    told = plan(store, "--documents", "mill2.md").fine().out
    assert "missed   1 chunk: not stored" in told
    level = plan(store, "--level", "2", "--json").fine().json
    assert {one["reason"] for one in level["chunks"]} == {"not stored at level 2"}


@pytest.mark.slow
def test_expected_times_are_the_controllers(measured: Path) -> None:
    row = plan(measured, "--json").fine().json
    tokens, expected = row["tokens"], row["expected_ms"]
    assert list(expected) == [*MODES]
    assert expected["full"] == pytest.approx(tokens["prompt"])  # a millisecond a row
    assert expected["reuse"] == pytest.approx(tokens["fresh"], rel=0.1)
    assert expected["reuse"] < expected["epic"] < expected["full"]
    few, many = (plan(measured, "--json", "--link-tokens", n).fine().json["expected_ms"]["epic"] for n in (1, 8))
    assert few < many
    low, high = (plan(measured, "--json", "--ratio", r).fine().json["expected_ms"]["union"] for r in (0.05, 0.5))
    assert low < high
    assert "expected full " in plan(measured).fine().out


def test_what_cannot_be_planned(store: Path, tmp_path: Path) -> None:
    assert kvtool("inspect", "plan", "--store", store).code == 2
    (tmp_path / "b.jsonl").write_text('{"question": "x"}\n')
    assert kvtool("inspect", "plan", "--store", store, "--batch", tmp_path / "b.jsonl").code == 2
    assert plan(store, "--level", "9").code == 2
    assert plan(store, "--model", save_tiny("qwen2", tmp_path / "other")).code == 12
    assert kvtool("inspect", "plan", "qqqq zzzz", "--store", store).code == 1


def test_settings_that_a_plan_has_no_flag_for_are_not_in_its_way(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan(store, "--json").fine().json
    for name, value in {"FUSION": "auto", "SLO_MS": "100", "SYSTEM": str(store / "none.txt")}.items():
        monkeypatch.setenv(f"KVTOOL_{name}", value)
    assert plan(store, "--json").fine().json["tokens"] == whole["tokens"]
