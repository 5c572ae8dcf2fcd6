"""Reading while a store is closed, and reading cut short by Ctrl-C: no thread waits for ever."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lmdb
import pytest

from kvtool.core.cache import environment, reader, tree
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import CHUNKS
from kvtool.core.errors import NoSpaceError
from tests.chaos.processes import run
from tests.stores import add_file, check_file, make_store
from tests.wording import refused


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def soon(thread: threading.Thread, seconds: float = 20) -> None:
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"


def test_a_closed_store_stays_open_for_its_reader(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    reading, closed = threading.Event(), threading.Event()

    def read() -> None:
        with opened.snapshot() as snapshot:
            reading.set()
            assert closed.wait(20)
            assert len(list(snapshot.keys(CHUNKS))) == 4
            done.set()

    done, opened = threading.Event(), Store.open(path)
    shared = opened.environment
    reader = in_thread(read)
    assert reading.wait(20)
    opened.close()
    with Store.open(path) as again:  # in the same environment: LMDB allows only one in a process
        assert again.environment is shared
        closed.set()
        soon(reader)
        check_file(again, "f0")
        assert done.is_set()


def test_a_map_that_is_too_small_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system grants few addresses: another process writes more than this one's map shows."""
    path = make_store(tmp_path / "store", files=1)
    monkeypatch.setenv("KVTOOL_MAP_LIMIT", str(2**17))
    with Store.open(path) as opened:
        assert run(path, "add", 1, 10, 2, 256, KVTOOL_MAP_LIMIT=str(2**24)).returncode == 0
        check_file(opened, "f10", dim=256)
        with opened.writer() as pen, refused(NoSpaceError):
            add_file(pen, "f11", ["f11.0", "f11.1"], dim=256)
        check_file(opened, "f10", dim=256)


def test_a_failed_meta_page_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(make_store(tmp_path / "store")) as opened:
        inner = opened.environment._env

        class Stuck:
            def begin(self, **options: object) -> None:
                raise lmdb.PanicError("MDB_PANIC")

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        for work in (opened.revision, lambda: opened.environment.write(lambda transaction: None, 0)):
            opened.environment._env = Stuck()
            work()
        check_file(opened, "f0")


def interrupt_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` with Ctrl-C at the number-th place of the store's reading code where Python looks at signals: after a
    call, at the start of a function, at the end of a loop's body. False: there are fewer."""
    count = itertools.count()
    ours = {one.__file__ for one in (environment, reader, tree)}
    before: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in ours:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, before[frame] = before.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and next(count) == number:
                raise KeyboardInterrupt
        return trace

    outside = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outside)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["revision", "stats"])
def test_ctrl_c_anywhere_in_reading(tmp_path: Path, use: str) -> None:
    path = make_store(tmp_path / "store")

    def every_place() -> None:
        for number in itertools.count():
            opened = Store.open(path)
            cut = interrupt_at(number, getattr(opened, use))
            soon(in_thread(opened.revision))
            soon(in_thread(opened.close))
            if not cut:
                places.append(number)
                return

    places: list[int] = []
    soon(in_thread(every_place), 60)
    assert places[0] > 20


def test_ctrl_c_while_lmdb_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(make_store(tmp_path / "store")) as opened:
        inner = opened.environment._env

        class Cut:
            def begin(self, **options: object) -> None:
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        monkeypatch.setattr(opened.environment, "_env", Cut())
        for work in (opened.revision, lambda: opened.environment.write(lambda transaction: None, 0)):
            with pytest.raises(KeyboardInterrupt):
                work()
        monkeypatch.undo()
        soon(in_thread(opened.revision))
