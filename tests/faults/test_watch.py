"""`kvtool watch` as a process of its own: what it says, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.core.ingest.watcher import Watcher
from tests.cli.working import CHUNKS, PREFIX, command, damages, environment, kvtool, listing

_LONG = 120  # seconds: other tests run at the same time


class Process:
    """A watch, its lines on stdout and stderr in the order in which they come."""

    def __init__(self, *args: object) -> None:
        self.child = subprocess.Popen(
            command("watch", *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        self.said: list[str] = []

    def wait_for(self, text: str) -> None:
        """Read on until a line has this text."""
        assert self.child.stdout is not None
        late = threading.Timer(_LONG, self.child.kill)
        late.start()
        try:
            while line := self.child.stdout.readline():
                self.said.append(line)
                if text in line:
                    return
        finally:
            late.cancel()
        pytest.fail(f"{text!r} was not said: {self.said}")

    def end(self, number: signal.Signals) -> int:
        self.child.send_signal(number)
        return self.child.wait(_LONG)


@pytest.fixture
def watch(tiny: Path, tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("The first mill grinds flour.")
    where = ("--store", tmp_path / "store", "--model", tiny, "--debounce", "0.1")
    process = Process(tmp_path / "docs", *where, *CHUNKS, *PREFIX)
    process.wait_for("watching")
    yield process
    process.end(signal.SIGKILL)
    assert process.child.stdout is not None
    process.child.stdout.close()


@pytest.mark.slow
def test_what_changes_is_said_and_a_signal_ends_it(watch: Process, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    (docs / "한국어.md").write_text("물레방아는 밀을 빻는다.")
    watch.wait_for(f"added {docs / '한국어.md'}: 1 chunk")
    (docs / "a.md").unlink()
    watch.wait_for(f"removed {docs / 'a.md'}")
    kvtool("ingest", docs, "--store", store, "--sync", "--lock-wait", "2m").fine()  # as cron does it
    assert watch.end(signal.SIGTERM) == 143
    watch.wait_for("no longer watching: 2 added, 0 changed, 1 removed")
    assert [Path(document["source"]).name for document in listing(store)] == ["한국어.md"]
    assert damages(store) == []


def test_one_json_object_cannot_be_made_of_it(tmp_path: Path) -> None:
    kvtool("watch", tmp_path, "--store", tmp_path / "store", "--json").failed(2, "--jsonl")


def test_ctrl_c_is_its_end_and_no_error(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("The first mill grinds flour.")

    def interrupted(watcher: Watcher) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watcher, "wait", interrupted)
    done = kvtool("watch", tmp_path / "a.md", "--store", tmp_path / "store", "--model", tiny, *CHUNKS, *PREFIX)
    assert done.code == 130
    assert "no longer watching: 1 added, 0 changed, 0 removed" in done.err
    assert "error" not in done.err
