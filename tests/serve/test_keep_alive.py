"""An engine that stays after a question: real processes with the tiny model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli import keep_alive
from kvtool.cli.app import main
from kvtool.cli.keep_alive import EngineRecord, shell_engine
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask
from kvtool.serve.unix_socket import socket_path
from tests.cli.working import CHUNKS, QUESTION, SHORT, command, environment, kvtool, process, terminal
from tests.serve.conftest import PATIENCE, serving, wait_until
from tests.serve.test_process import running

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at processes as Linux shows them")
KEEP = ("--keep-alive", "10m")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVTOOL_CACHE", raising=False)
    yield tmp_path / "home"
    for engine in keep_alive.engines():
        os.kill(engine.pid, signal.SIGKILL)


def asked(store: Path, *more: object) -> tuple[object, ...]:
    return ("query", QUESTION, "--store", store, *SHORT, *more)


def engines() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kvtool("ps", "--json").fine().json["engines"]
    return found


def engine_of(store: Path, *more: object) -> EngineRecord:
    kvtool(*asked(store, *KEEP, *more)).fine()
    (engine,) = [each for each in keep_alive.engines() if each.store == str(store)]
    return engine


def wait_for_end(engine: EngineRecord) -> None:
    wait_until(lambda: engine.pid not in [each.pid for each in keep_alive.engines()])


def kill(engine: EngineRecord) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    wait_for_end(engine)


def answer(store: Path, *more: object) -> dict[str, Any]:
    facts: dict[str, Any] = kvtool(*asked(store, "--json", *more)).fine().json
    return {name: facts[name] for name in ("answer", "finish", "fusion", "chunks", "tokens", "revision")}


def test_the_second_question_is_answered_by_the_engine_of_the_first(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("KVTOOL_SERVER", "no")
        alone = answer(store)
    kvtool(*asked(store, *KEEP)).fine()
    kvtool(*asked(store)).fine()
    assert answer(store) == answer(store, *KEEP) == alone
    wait_until(
        lambda: not keep_alive.engines()[0].running
    )  # which is noted after an answer's end, and its line in the log
    (engine,) = engines()
    assert (engine["store"], engine["requests"]) == (str(store), 4)
    assert engine["expires"] > engine["started"]
    assert engine["memory_bytes"] > 10**7
    assert engine["model"]
    log = Path(engine["log"])
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [row["status"] for row in rows] == [200] * 4
    assert "third" not in log.read_text()  # no word of a question
    shown = kvtool("ps").fine().out
    assert str(engine["pid"]) in shown
    assert "MB" in shown

    ended = kvtool("stop", "--store", store, "--json").fine().json["stopped"]
    assert [each["pid"] for each in ended] == [engine["pid"]]
    assert engines() == []
    assert not socket_path(store).exists()
    assert "no model stays loaded" in kvtool("ps").fine().err
    assert "no model stays loaded" in kvtool("stop", "--store", store).fine().err


@pytest.mark.slow
def test_many_shells_start_one_engine(store: Path) -> None:
    shells = [
        subprocess.Popen(
            command(*asked(store, *KEEP)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
        )
        for _ in range(20)
    ]
    said = {shell.communicate(timeout=PATIENCE)[0] for shell in shells}
    assert [shell.returncode for shell in shells] == [0] * 20
    assert len(said) == 1
    assert len(engines()) == 1
    wait_until(lambda: engines()[0]["requests"] == 20)


@pytest.mark.slow
def test_a_killed_engine_blocks_nothing(store: Path) -> None:
    before = engine_of(store)
    kill(before)
    assert engines() == []
    assert socket_path(store).exists()
    now = engine_of(store)
    before.end()  # which waits for no other
    assert [each.pid for each in keep_alive.engines()] == [now.pid] != [before.pid]


@pytest.mark.slow
def test_commands_that_look_at_once_are_no_engine(store: Path) -> None:
    """They would take the process of a record for one, and `kvtool stop` would end whatever has its number now."""
    engine = engine_of(store)
    kill(engine)
    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(lambda _: keep_alive.engines(), range(2000)))


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_that_is_killed_while_it_loads(store: Path) -> None:
    shell = subprocess.Popen(command(*asked(store, *KEEP)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(keep_alive.engines)
    (engine,) = keep_alive.engines()
    os.kill(engine.pid, signal.SIGKILL)
    out, err = shell.communicate(timeout=PATIENCE)
    assert (shell.returncode, bool(out.strip())) == (0, True), err
    assert engine_of(store).pid != engine.pid


@pytest.mark.slow
def test_an_engine_ends_some_time_after_the_last_question(store: Path) -> None:
    engine = engine_of(store)
    kvtool(*asked(store, "--keep-alive", "1ms")).fine()
    wait_for_end(engine)
    assert engines() == []
    assert "no question came" in Path(engine.log).read_text()


@pytest.mark.slow
def test_a_store_that_is_made_again_is_answered_from(store: Path, tiny: Path, tmp_path: Path) -> None:
    engine = engine_of(store)
    shutil.rmtree(store)
    (tmp_path / "note.md").write_text("# A note\n\nThe third mill was built by nobody at all.\n")
    made = ("ingest", tmp_path / "note.md", "--store", store, "--model", tiny, *CHUNKS)
    kvtool(*made).fine()
    chunks = kvtool(*asked(store, "--json")).fine().json["chunks"]
    assert [Path(chunk["source"]).name for chunk in chunks] == ["note.md"]
    wait_for_end(engine)
    assert engine_of(store).pid != engine.pid


@pytest.mark.slow
def test_an_engine_without_its_store_ends(store: Path) -> None:
    engine = engine_of(store)
    shutil.rmtree(store)
    kvtool(*asked(store, *KEEP)).failed(10, "no store")
    wait_for_end(engine)
    kvtool(*asked(store, *KEEP)).failed(10, "no store")
    assert engines() == []


@pytest.mark.slow
def test_an_engine_whose_record_cannot_be_written_answers_and_ends(store: Path) -> None:
    engine = engine_of(store)
    wait_until(lambda: not keep_alive.engines()[0].running)  # after which it writes nothing
    Path(engine.log).with_suffix(".new").mkdir()
    assert "was not used" not in kvtool(*asked(store, "--keep-alive", "1ms")).fine().err
    wait_for_end(engine)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["record", "socket"])
def test_an_engine_that_cannot_be_found_ends(store: Path, lost: str) -> None:
    engine = engine_of(store)
    wait_until(lambda: not keep_alive.engines()[0].running)  # after which it writes nothing
    if lost == "record":
        shutil.rmtree(Path(engine.log).parent)
    else:
        socket_path(store).unlink()
    wait_until(lambda: not _is_alive(engine.pid))
    assert engine_of(store).pid != engine.pid


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_no_pipe_and_no_terminal_is_kept_open(store: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    shell = subprocess.Popen(
        command(*asked(store, *KEEP)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, close_fds=False
    )
    os.close(writing)
    shell.communicate(timeout=PATIENCE)  # until no process can write there
    with open(reading, "rb") as pipe:
        assert pipe.read() == b""
    (engine,) = keep_alive.engines()
    open_files = set[str]()
    for each in Path(f"/proc/{engine.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it writes its record now and then
            open_files.add(os.readlink(each))
    assert not [name for name in open_files if "pts" in name or "tty" in name]
    assert os.getsid(engine.pid) not in (os.getsid(0), engine.pid)  # nor can it ever get a terminal


@pytest.mark.slow
def test_sigterm_lets_answers_end(store: Path) -> None:
    engine = engine_of(store)
    shell = subprocess.Popen(
        command("query", QUESTION, "--store", store, "--max-tokens", "200", "--set", "sampling.stop_repeats=no"),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_until(lambda: keep_alive.engines()[0].running)
    os.kill(engine.pid, signal.SIGTERM)
    out, _ = shell.communicate(timeout=PATIENCE)
    assert (shell.returncode, bool(out.strip())) == (0, True)
    wait_for_end(engine)
    assert not socket_path(store).exists()
    assert "Traceback" not in Path(engine.log).read_text()


def test_an_answer_may_take_its_time(store: Path) -> None:
    engine = shell_engine(store, ModelOptions(), memory_cache=0)
    assert engine.submit(Ask(Request(QUESTION), QueryOptions()), print).timeout > 10**8
    engine.close()


def at_terminal(*args: object, without: str = "") -> str:
    """Run kvtool in this process with a terminal as its three streams, but one; return what the terminal shows."""
    with (
        pytest.MonkeyPatch.context() as patch,
        terminal(300) as written,
        open(sys.stdout.fileno(), encoding="utf-8", closefd=False) as keyboard,
    ):
        streams = {"stdin": keyboard, "stdout": sys.stdout, "stderr": sys.stdout}
        for name, stream in streams.items():
            patch.setattr(sys, name, io.StringIO() if name == without else stream)
        assert main([str(arg) for arg in args]) == 0
    return written()


def test_the_model_stays_loaded_for_a_person_at_a_terminal(store: Path) -> None:
    said = f"stays loaded for 5 minutes: `kvtool stop --store {store}` unloads it, `--keep-alive 0` turns this off\n"
    assert said in at_terminal(*asked(store))
    (engine,) = keep_alive.engines()
    assert 200 < engine.ends - time.time() <= 300
    assert "stays loaded" not in at_terminal(*asked(store))
    assert [each.pid for each in keep_alive.engines()] == [engine.pid]
    wait_until(lambda: engines()[0]["requests"] == 2)


@pytest.mark.parametrize(
    ("more", "without"),
    [(option, "") for option in ("--json", "--jsonl", "--explain", "--compare epic", "--keep-alive 0")]
    + [("", stream) for stream in ("stdin", "stdout", "stderr")],
)
def test_nothing_stays_loaded_after_questions_of_programs(store: Path, more: str, without: str) -> None:
    at_terminal(*asked(store, *more.split()), without=without)
    assert engines() == []


@pytest.mark.slow
def test_a_setting_is_for_people(store: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of cron has no terminal; and the file of a folder may be anybody's."""
    assert process(*asked(store), KVTOOL_KEEP_ALIVE="10m").fine().out
    assert engines() == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvtool.toml").write_text('keep_alive = "10m"\n')
    kvtool(*asked(store)).failed(2, "keep_alive")
    (tmp_path / "kvtool.toml").unlink()
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text("keep_alive = 0\n")
    at_terminal(*asked(store))
    assert engines() == []
    monkeypatch.setenv("KVTOOL_KEEP_ALIVE", "10m")
    assert "stays loaded for 10 minutes" in at_terminal(*asked(store))
    assert len(engines()) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_of_other_code_is_replaced(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade: its answers may differ, and it may not understand the question."""
    engine = engine_of(store)
    monkeypatch.setattr(keep_alive, "code_stamp", lambda: "another version")
    kvtool(*asked(store)).fine()
    wait_until(lambda: not keep_alive.engines()[0].running)
    assert [(each.pid, each.requests) for each in keep_alive.engines()] == [(engine.pid, 1)]
    assert engine_of(store).pid != engine.pid


@pytest.mark.slow
def test_ctrl_c_leaves_the_engine_to_the_next_question(store: Path) -> None:
    shell = subprocess.Popen(command(*asked(store, *KEEP)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(keep_alive.engines)
    shell.send_signal(signal.SIGINT)
    shell.communicate(timeout=PATIENCE)
    assert shell.returncode == 130
    (engine,) = keep_alive.engines()
    assert engine_of(store).pid == engine.pid


@pytest.mark.parametrize("more", [(), ("--explain",), ("--compare", "epic")], ids=["server", "explain", "compare"])
def test_what_it_cannot_do_is_refused(store: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if not more:
        monkeypatch.setenv("KVTOOL_SERVER", "no")
    kvtool(*asked(store, *KEEP, *more)).failed(2, "--keep-alive is for one question")
    assert engines() == []


def test_an_error_starts_nothing(store: Path, home: Path, tmp_path: Path) -> None:
    kvtool(*asked(store, *KEEP, "--model", tmp_path / "none")).failed(12)
    kvtool(*asked(store, *KEEP, "--set", "search.source=none")).failed(2, "no document matches")
    kvtool(*asked(tmp_path / "none", *KEEP)).failed(10)
    assert not (home / "cache" / "engines").exists()


def test_a_server_that_runs_is_used_instead(store: Path) -> None:
    with serving(store) as served:
        kvtool(*asked(store, *KEEP)).fine()
        assert [row["client"] for row in served.logged(1)] == ["shell"]
    assert engines() == []


@pytest.mark.slow
def test_a_server_that_starts_replaces_it(store: Path) -> None:
    engine_of(store)
    with running("--store", store, "--no-key"):
        assert engines() == []
        assert socket_path(store).exists()


@pytest.mark.slow
def test_stop_ends_those_of_all_stores(store: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(store, tmp_path / "other"))
    pids = {engine_of(store).pid, engine_of(other).pid}
    assert "2 others" in kvtool("stop", "--store", tmp_path / "third").fine().err
    assert {each["pid"] for each in kvtool("stop", "--all", "--json").fine().json["stopped"]} == pids
    assert engines() == []


def test_a_home_that_cannot_be_written_is_done_without(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file"))
    done = kvtool(*asked(store, *KEEP)).fine()
    assert "no model stays loaded" in done.err
