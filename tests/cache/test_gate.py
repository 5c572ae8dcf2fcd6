"""Reading while the map is changed, and reading cut short by Ctrl-C: no thread waits for ever."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvtool.core.cache import environment, reader, transaction
from kvtool.core.cache.store import Store
from kvtool.core.cache.transaction import ReadWriteLock, TransactionGuard
from tests.cache.making import check_file, make_store


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def soon(thread: threading.Thread, seconds: float = 20) -> None:
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"


def test_who_waits_to_be_alone_is_not_starved() -> None:
    lock, first, nested, late = ReadWriteLock(), TransactionGuard(), TransactionGuard(), TransactionGuard()
    order: list[str] = []
    alone_now, late_in = threading.Event(), threading.Event()

    def alone() -> None:
        def work() -> None:
            order.append("alone")
            alone_now.set()

        lock.run_alone(work)

    def enter_late() -> None:
        lock.enter(late)
        order.append("late")
        late_in.set()

    lock.enter(first)
    waiting = in_thread(alone)
    while not lock._waiting:
        pass
    reader = in_thread(enter_late)
    assert not late_in.wait(0.15)  # a new thread is kept out ...
    lock.enter(nested)  # ... one that is inside is not
    nested.end()
    assert not alone_now.is_set()
    first.end()
    soon(waiting)
    soon(reader)
    assert order == ["alone", "late"]


def test_the_map_changes_under_readers_in_a_loop(tmp_path: Path) -> None:
    """Let six readers overlap: at nearly every moment one of them is reading."""
    done = threading.Event()
    with Store.open(make_store(tmp_path / "store")) as opened:

        def read() -> None:
            while not done.is_set():
                check_file(opened, "f0")

        readers = [in_thread(read) for _ in range(6)]
        changing = in_thread(lambda: [opened.environment._resize(0) for _ in range(5)])
        try:
            soon(changing)
        finally:
            done.set()
        for reader in readers:
            soon(reader)


def interrupt_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` with Ctrl-C at the number-th place of the store's reading code where Python looks at signals: after a
    call, at the start of a function, at the end of a loop's body. False: there are fewer."""
    count = itertools.count()
    ours = {one.__file__ for one in (environment, reader, transaction)}
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
            opened.environment._resize(0)  # this thread goes on, ...
            other = in_thread(lambda opened=opened: opened.environment._resize(0))  # type: ignore[misc]
            soon(other)  # ... another one too, ...
            soon(in_thread(opened.close))  # ... and closing ends
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
        soon(in_thread(lambda: opened.environment._resize(0)))
