"""The phases of an ingest, its forecast before the first chunk, and its progress in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint.files import DOWNLOAD
from kvtool.core.common.types import Events
from kvtool.core.corpus.walk import FoundFile
from kvtool.core.ingest import account
from kvtool.core.ingest.account import Estimate
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import PHASES, Forecast
from tests.cli.working import CHUNKS, PREFIX, kvtool, write_corpus


@pytest.mark.slow
def test_a_first_run_tells_its_phases_and_an_idle_one_loads_nothing(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    first = fresh(folder).fine().json
    assert set(first["phases"]) == {"model_files", "model_load", "lead_in", "index", "gate"}
    assert all(seconds > 0 for seconds in first["phases"].values())
    assert sum(first["phases"].values()) + first["prefill_seconds"] <= first["seconds"]
    assert set(fresh(folder).fine().json["phases"]) == {"model_files"}


def test_a_phase_within_a_phase_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[str]()
    monkeypatch.setattr(account.time, "perf_counter", lambda: now[0])
    kept = account.Account(IngestOptions(), Events(status=told.append))
    with kept.phase("model_files"):
        now[0] += 1
        with kept.phase(DOWNLOAD):
            now[0] += 20
        now[0] += 2
    with kept.phase("model_files"):
        now[0] += 4
    assert kept.report.phases == {"model_download": 20, "model_files": 7}
    assert told == [PHASES[name] for name in ("model_files", "model_download", "model_files")]


GB = 10**9


def found(name: str, size: int, guessed: bool = False) -> FoundFile:
    return FoundFile(f"/in/{name}", size, 0, 0, guessed)


def test_the_estimate_learns_from_what_is_read() -> None:
    files = [found(f"{number}.md", 100_000) for number in range(10)]
    guessed = [found("weights.dat", 10**9, True), found("p.png", 90_000, True), found("LEGAL", 4000, True)]
    estimate = Estimate([*files, found("a.pdf", 10**6), *guessed])
    assert estimate.tokens == pytest.approx(10 * 25_000 + 50_000 + 1000)
    for file in files[:5]:
        assert estimate.pass_by(file.name)
        assert not estimate.pass_by(file.name)
        estimate.learn(file.name, file.size, 50_000)  # short words
    for name in ("a.pdf", "weights.dat", "p.png", "LEGAL"):
        assert estimate.pass_by(f"/in/{name}")
    assert estimate.tokens == pytest.approx(5 * 50_000, rel=0.03)
    for file in files[5:]:
        estimate.pass_by(file.name)
    assert estimate.tokens == 0


@pytest.mark.parametrize(
    ("size", "disk", "level", "much"),
    [
        (GB, 50 * GB, "raw", False),
        (GB, 8 * GB, "raw", True),
        (3 * GB, 500 * GB, "raw", True),
        (3 * GB, 5 * GB, "2", False),
    ],
)
def test_what_makes_it_smaller_is_named_where_it_is_much(size: int, disk: int, level: str, much: bool) -> None:
    ahead = Forecast(41_000, size, None, disk, level)
    assert ("--level lossless" in ahead.advice() and "kvtool compress" in ahead.advice()) == much
    assert ("before compression" in ahead.text()) == (level != "raw")


def test_minutes_are_told_where_a_speed_is_known() -> None:
    told = [Forecast(41_000, GB, seconds, 50 * GB, "raw").text() for seconds in (None, 50.0, 700.0, 10_000.0)]
    assert told[0] == "about 41,000 tokens to compute: 1.0 GB of KV, 50.0 GB of disk free"
    ends = ["a minute", "12 min", "3 h"]
    assert told[1:] == [f"{told[0]}; about {end} at the speed of the last ingest" for end in ends]


@pytest.mark.slow
def test_a_dry_run_says_what_it_will_take(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.account._MIN_TOKENS", 1)
    folder, store = write_corpus(tmp_path / "in"), tmp_path / "store"
    args = ("ingest", folder, "--store", store, "--model", tiny, *CHUNKS, *PREFIX)
    planned = kvtool(*args, "--dry-run", "--json").fine().json
    done = kvtool(*args, "--json").fine().json
    ahead = planned["forecast"]
    assert ahead["tokens"] == planned["tokens"] == done["tokens"]
    assert ahead["kv_bytes"] == pytest.approx(done["kv_bytes"], rel=0.3)  # headers are not in it
    assert (ahead["seconds"], ahead["level"]) == (None, "raw")
    assert ahead["disk_free"] > 0
    write_corpus(tmp_path / "more", 9)
    more = kvtool("ingest", tmp_path / "more", "--store", store, "--dry-run").fine().out
    assert "at the speed of the last ingest\n" in more
    assert kvtool(*args, "--json").fine().json["forecast"] is None


@pytest.mark.slow
def test_the_first_line_says_what_it_will_take(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path / "in")
    assert "tokens to compute" not in fresh(folder, store=tmp_path / "quick").fine().err  # not worth a word
    monkeypatch.setattr("kvtool.core.ingest.report._NOTED_BYTES", 1)
    monkeypatch.setattr("kvtool.core.ingest.report._MUCH_BYTES", 1)
    done = fresh(folder).fine()
    first, second = done.err.splitlines()[:2]
    assert first.startswith("about ")
    assert " of KV, " in first
    assert "--level" in second
    assert fresh(folder, "--quiet", store=tmp_path / "still").fine().err == ""
