"""`ingest --log`: one JSON event a line, however the run ends."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.ingest.survey import Survey
from tests.cli.working import kvtool, write_corpus


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
