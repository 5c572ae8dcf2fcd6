"""`--fusion auto` at the command: what it chose and why, and speeds that are measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.fusion.plan import LoadSpeed, PassSpeed
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.session import speeds
from kvtool.core.session.session import Session
from tests.cli.working import QUESTION, SHORT, Done, kvtool
from tests.query.test_levels import know

CACHE_PAYS = PassSpeed(fixed=1e-4, row=1e-3, key=0.0)
COMPUTE_PAYS = PassSpeed(fixed=1e-9, row=1e-12, key=0.0)
LOSSES = {"l1": 0.001, "l2": 0.002, "l3": 0.3, "l4": 0.4}


class Stopwatch:
    """Counts measurements, and gives made-up speeds."""

    def __init__(self, passes: PassSpeed) -> None:
        self.passes, self.loads = passes, LoadSpeed(1e-5, 1e-6, 1.0, 1e9)
        self.measured: list[str] = []
        self.by_level: dict[str, LoadSpeed] = {}

    def measure_pass(self, decoder: Any) -> PassSpeed:
        self.measured.append("pass")
        return self.passes

    def measure_load(self, decoder: Any, source: Any, chunks: Any) -> LoadSpeed:
        level = chunks[0].level
        self.measured.append(level)
        return self.by_level.get(level, self.loads)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "is_busy", lambda: False)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """On a machine where the cache pays."""
    watch = Stopwatch(CACHE_PAYS)
    monkeypatch.setattr(speeds, "measure_pass", watch.measure_pass)
    monkeypatch.setattr(speeds, "measure_load", watch.measure_load)
    return watch


def ask(store: Path, *more: object) -> Done:
    return kvtool("query", QUESTION, "--store", store, "--fusion", "auto", *SHORT, *more, "--json").fine()


def kept(store: Path) -> Path:
    (file,) = (each for each in (store / "speeds").iterdir() if each.name != "ingest.json")
    return file


@pytest.mark.slow
def test_measured_for_real(store: Path) -> None:
    row = ask(store).json
    controller = row["controller"]
    assert row["fusion"] == controller["fusion"] in ("full", "prefix", "union")
    assert set(controller) == {"fusion", "ratio", "level", "expected_ms", "level_ms"}
    assert set(controller["expected_ms"]) == {"full", "prefix", "union"}
    assert all(ms > 0 for ms in controller["expected_ms"].values())
    assert row["timing_ms"]["profile"] > 0
    assert row["timing_ms"]["ttft"] >= row["timing_ms"]["decide"] > 0
    (machine,) = json.loads(kept(store).read_text())["machines"].values()
    assert set(machine) == {"pass", "loads"}
    assert set(machine["loads"]) == {"raw"}
    assert machine["loads"]["raw"]["bytes_per_second"] > 0


def test_the_mode_and_the_ratio_that_were_chosen(store: Path, watch: Stopwatch) -> None:
    done = ask(store, "--ratio", "0.3")
    row = done.json
    assert (row["fusion"], row["controller"]["level"]) == ("union", "raw")
    assert row["controller"]["ratio"] >= 0.3
    same = ("query", QUESTION, "--store", store, "--fusion", "union", *SHORT, "--json")
    union = kvtool(*same, "--ratio", row["controller"]["ratio"]).fine().json
    assert (union["answer"], union["tokens"]) == (row["answer"], row["tokens"])
    assert "controller" not in union
    assert "profile" not in union["timing_ms"]
    assert done.err.count("auto: union at 3") == 1
    assert "from level raw" in done.err


def test_full_where_computing_is_fast(store: Path, watch: Stopwatch) -> None:
    watch.passes = COMPUTE_PAYS
    row = ask(store).json
    assert row["fusion"] == "full"
    assert (row["controller"]["ratio"], row["controller"]["level"]) == (None, None)
    assert row["tokens"]["reused"] == 0


def test_reasons_are_for_those_who_ask(store: Path, watch: Stopwatch) -> None:
    quiet, loud = ask(store), ask(store, "-v")
    assert "expected: full" in loud.err
    assert "expected: full" not in quiet.err
    assert kvtool("query", QUESTION, "--store", store, "--fusion", "auto", *SHORT, "-q").fine().err == ""


def test_measured_once_and_kept(store: Path, watch: Stopwatch) -> None:
    first, second = ask(store), ask(store)
    assert watch.measured == ["pass", "raw"]
    assert "measuring" in first.err
    assert "measuring" not in second.err
    fields = ("fusion", "ratio", "level")
    assert [first.json["controller"][name] for name in fields] == [second.json["controller"][name] for name in fields]


BROKEN = ["", "{", "[]", '{"format": 1}', '{"format": 99, "machines": {}}', '{"format": 1, "machines": 7}']


@pytest.mark.slow
@pytest.mark.parametrize("content", [*BROKEN, {"fixed": -1}, {"fixed": None}])
def test_a_file_that_cannot_be_used_is_made_anew(content: str | dict[str, Any], store: Path, watch: Stopwatch) -> None:
    ask(store)
    if isinstance(content, dict):
        value = json.loads(kept(store).read_text())
        for machine in value["machines"].values():
            machine["pass"] |= content
        content = json.dumps(value)
    kept(store).write_text(content)
    ask(store)
    ask(store)
    assert watch.measured == ["pass", "raw"] * 2


def test_a_store_that_cannot_be_written(store: Path, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "read_only", True)
    ask(store)
    ask(store)
    assert watch.measured == ["pass", "raw"] * 2
    assert {each.name for each in (store / "speeds").glob("*")} <= {"ingest.json"}  # of the run that made the store


@pytest.mark.slow
def test_what_a_busy_machine_does_is_not_kept(store: Path, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "is_busy", lambda: True)
    assert "it is busy" in ask(store).err
    monkeypatch.setattr(speeds, "is_busy", lambda: False)
    ask(store)
    assert watch.measured == ["pass", "raw"] * 2
    ask(store)
    assert watch.measured == ["pass", "raw"] * 2


def test_records_that_cannot_be_read_are_holes(store: Path, watch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "measure_load", lambda *args: None)
    assert ask(store).json["controller"]["fusion"] in ("full", "prefix")


@pytest.mark.slow
def test_compare(store: Path, watch: Stopwatch) -> None:
    args = ("query", QUESTION, "--store", store, "--compare", "reuse,auto", *SHORT)
    row = kvtool(*args, "--json").fine().json
    assert [run["fusion"] for run in row["runs"]] == ["full", "reuse", "union"]
    assert ["controller" in run for run in row["runs"]] == [False, False, True]
    assert row["runs"][2]["kl_first"] >= 0
    assert "auto (union)" in kvtool(*args).fine().out


@pytest.mark.slow
def test_batch(store: Path, watch: Stopwatch, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"question": "mill", "answers": ["x"]}\n{"question": "baker"}\n')
    at = ("query", "--batch", tmp_path / "b.jsonl", "--store", store, *SHORT)
    *rows, summary = kvtool(*at, "--fusion", "auto").fine().lines
    assert all(row["controller"]["fusion"] == row["fusion"] for row in rows)
    assert (summary["fusion"], summary["count"]) == ("auto", 2)
    assert watch.measured == ["pass", "raw"]
    *_, summary = kvtool(*at, "--compare", "union,auto").fine().lines
    assert [run["fusion"] for run in summary["runs"]] == ["full", "union", "auto"]


def test_chunks_that_are_held_are_not_counted_as_read(store: Path, watch: Stopwatch) -> None:
    """Reading takes so long that computing is faster, until an earlier question has read them."""
    watch.loads = LoadSpeed(0.0, 1.0, 1.0, 1e9)
    request = Request("mill", documents=("mill2.md",))
    auto, reuse = QueryOptions(fusion="auto", max_tokens=2), QueryOptions(fusion="reuse", max_tokens=2)
    with Store.open(store) as opened:
        session = Session.open(opened, memory_cache=10**9)
        modes = [answer(session, request, options).fusion for options in (auto, reuse, auto)]
        assert modes == ["full", "reuse", "union"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fast", "more", "chosen", "weighed"),
    [
        ("2", (), "2", {"raw", "1", "2"}),
        ("3", (), "raw", {"raw", "1", "2"}),  # not allowed: it loses too much
        ("3", ("--set", "load.max_loss=0.35"), "3", {"raw", "1", "2", "3"}),
        ("2", ("--level", "1"), "1", {"1"}),
        ("", (), "raw", {"raw", "1", "2"}),
    ],
)
def test_the_level_that_is_expected_to_be_fastest(
    fast: str,
    more: tuple[str, ...],
    chosen: str,
    weighed: set[str],
    fitted: Path,
    watch: Stopwatch,
) -> None:
    know(fitted, **LOSSES)
    watch.loads, watch.by_level = LoadSpeed(0.0, 1e-4, 1.0, 1e9), {fast: LoadSpeed(0.0, 1e-7, 1.0, 1e9)}
    args = ("query", "Where?", "--store", fitted, "--documents", "mill0.md", *SHORT, "--json")
    row = kvtool(*args, "--fusion", "auto", *more).fine().json
    assert row["controller"]["fusion"] == "union"
    assert row["controller"]["level"] == chosen
    assert set(row["controller"]["level_ms"]) == weighed
    given = ("--fusion", "union", "--ratio", row["controller"]["ratio"], "--level", chosen)
    assert kvtool(*args, *given).fine().json["bytes_read"] == row["bytes_read"]


@pytest.mark.slow
def test_a_level_that_came_later_is_measured_then(fitted: Path, watch: Stopwatch) -> None:
    know(fitted, **LOSSES)
    for more in (("--level", "raw"), (), ()):
        ask(fitted, "--documents", "mill0.md", *more)
    assert watch.measured == ["pass", "raw", "1", "2"]
