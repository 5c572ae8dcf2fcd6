"""Progress of an ingest: the events of `--log`, phases, the forecast before the first chunk, and whom it waits for."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.checkpoint.files import DOWNLOAD
from kvtool.core.common.types import Events
from kvtool.core.ingest import report
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import PHASES, Forecast
from kvtool.core.ingest.survey import Survey
from tests.cli.working import CHUNKS, PREFIX, command, environment, kvtool, write_corpus
from tests.serve.conftest import PATIENCE, wait_until


def events(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for event in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
        assert event["pid"] == os.getpid()
    return found


@pytest.mark.slow
def test_the_log_of_two_runs(fresh: Any, tmp_path: Path) -> None:
    folder, log = write_corpus(tmp_path / "in", 2, 1), tmp_path / "log.jsonl"
    (folder / "odd.txt").write_bytes(b"The mill \xff stands on the river. " * 9)
    (folder / "bad.jsonl").write_text("no JSON")
    (folder / "empty.txt").touch()
    fresh(folder, "--log", log, "--quiet").fine(3)
    first = events(log)
    assert (first[0]["message"], first[0]["paths"]) == ("started", [str(folder)])
    step = next(event for event in first if event["message"] == "computing KV")
    assert (step["unit"], step["total"] > 0) == ("tokens", True)
    assert {event["type"] for event in first} == {"status", "warning", "error", "summary"}
    (error,) = [event for event in first if event["type"] == "error"]
    assert error["path"] == str(folder / "bad.jsonl")
    assert "line 1" in error["message"]
    assert "odd.txt" in next(event["message"] for event in first if event["type"] == "warning")
    summary = first[-1]
    assert summary["type"] == "summary"
    assert (summary["exit_code"], summary["documents"]["added"], summary["skipped"]["empty"]) == (3, 3, 1)
    (folder / "bad.jsonl").unlink()
    done = kvtool("ingest", folder, "--store", tmp_path / "fresh", "--log", log, "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert events(log)[-1]["exit_code"] == 0
    assert len(events(log)) > len(first)


def test_a_log_within_the_folder_is_not_read(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    for added in (1, 0):
        done = fresh(folder, "--log", folder / "log.jsonl").fine()
        assert done.json["documents"]["added"] == added


@pytest.mark.parametrize("place", ["no/such/log.jsonl", ".", "fifo"])  # nobody reads the last one
def test_a_log_that_cannot_be_written_is_said_at_the_start(place: str, fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    os.mkfifo(tmp_path / "fifo")
    fresh(folder, "--log", tmp_path / place).failed(2, "cannot be written")
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), MemoryError(), ValueError("odd")])
def test_aborted_run(raised: BaseException, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, log = write_corpus(tmp_path / "in", 1, 1), tmp_path / "log.jsonl"

    def breaking(*args: Any) -> None:
        raise raised

    monkeypatch.setattr(Survey, "look", breaking)
    done = fresh(folder, "--log", log)
    last = events(log)[-1]
    assert (last["type"], last["error"]["exit_code"]) == ("error", done.code)
    assert last["error"]["message"] in done.err


def test_a_full_disk_under_the_log_ends_no_ingest(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    done = fresh(folder, "--log", "/dev/full").fine()
    assert done.json["documents"]["added"] == 1
    assert "the log /dev/full is not complete" in done.err


def test_every_command_of_the_documentation(fresh: Any, tmp_path: Path) -> None:
    fresh(write_corpus(tmp_path / "documents", 2, 1)).fine()
    places = {"/srv/documents": tmp_path / "documents", "/var/lib/kvtool/store": tmp_path / "fresh"}
    places |= {"/var/log/kvtool": tmp_path}
    page = (Path(package.__file__).parent / "docs" / "guide" / "cron.md").read_text()
    lines = re.findall(r"kvtool ((?:ingest|store prune) .*--quiet.*)", page)  # warm needs a shared store: tests/remote
    assert len(lines) == 4
    for line in lines:
        for there, here in places.items():
            line = line.replace(there, str(here))
        done = kvtool(*shlex.split(line))
        assert (done.code, done.out, done.err) == (0, "", "")


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
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    kept = report.Account(IngestOptions(), Events(status=told.append))
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
    assert told[0] == "41,000 tokens to compute: 1.0 GB of KV, 50.0 GB of disk free"
    ends = ["a minute", "12 min", "3 h"]
    assert told[1:] == [f"{told[0]}; about {end} at the speed of the last ingest" for end in ends]


@pytest.mark.slow
def test_a_dry_run_says_what_it_will_take(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.report._MIN_TOKENS", 1)
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
    more = kvtool("ingest", tmp_path / "more", "--store", store, "--dry-run", "--json").fine().json
    assert more["forecast"]["seconds"] > 0
    assert kvtool(*args, "--json").fine().json["forecast"] is None


@pytest.mark.slow
def test_the_first_line_says_what_it_will_take(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path / "in")
    assert "tokens to compute" not in fresh(folder, store=tmp_path / "quick").fine().err  # not worth a word
    monkeypatch.setattr("kvtool.core.ingest.report._NOTED_BYTES", 1)
    monkeypatch.setattr("kvtool.core.ingest.report._MUCH_BYTES", 1)
    done = fresh(folder).fine()
    first, second = done.err.splitlines()[:2]
    assert "tokens to compute: " in first
    assert "--level" in second
    assert fresh(folder, "--quiet", store=tmp_path / "still").fine().err == ""


HOLDING = "import sys; from pathlib import Path; from kvtool.core.cache.store import Store\n"
HOLDING += "with Store.open(Path(sys.argv[1])) as store, store.writer():\n    print('held', flush=True); input()"


def test_an_ingest_names_the_process_that_it_waits_for(store: Path, corpus: Path) -> None:
    words = [sys.executable, "-c", HOLDING, str(store)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = f"is being written by process {other.pid}"
        done = kvtool("ingest", corpus, "--store", store, "--lock-wait", "10ms").failed(11, said)
        assert f"waiting: {store} {said}" in done.err
        assert "waiting" not in kvtool("ingest", corpus, "--store", store, "--lock-wait", 0).failed(11, said).err
        other.communicate("\n")
    assert "waiting" not in kvtool("ingest", corpus, "--store", store).fine().err


@pytest.mark.slow
def test_ingest_waits_for_the_maker(corpus: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names no model, so it would take the default one if it did not."""
    monkeypatch.setenv("KVTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVTOOL_CACHE", raising=False)
    store = tmp_path / "store"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    first = subprocess.Popen(command("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS), **pipes)
    wait_until(lambda: [*(tmp_path / "home" / "cache" / "making").glob("*/writer.json")])
    os.kill(first.pid, signal.SIGSTOP)
    assert not store.exists()
    second = subprocess.Popen(command("ingest", corpus, "--store", store, "--lock-wait", "10m", *CHUNKS), **pipes)
    assert second.stderr is not None
    line = second.stderr.readline()
    os.kill(first.pid, signal.SIGCONT)
    assert line.startswith(f"waiting: {store} is being made by process {first.pid} (")
    for each in (first, second):
        _, err = each.communicate(timeout=PATIENCE)
        assert each.returncode == 0, err
    assert kvtool("inspect", "--store", store, "--json").fine().json["model"] == str(tiny)
