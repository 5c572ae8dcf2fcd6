"""Which files of kvtool a question, a document and a record pass on their way; see --help.

A trip leads through some rooms. A file is *entered* when a file of those rooms calls one of its functions while none of
its functions is on the stack of that thread; calls that it makes in a room below are not counted, and the trip
continues when the call returns. Calls from one file are one entry: a loop over chunks counts once, calls from two files
count twice. A method counts for the file of its object's class; a value's own check (`__post_init__`) does not count.
Left out are the rooms that know neither a store nor a model, and what talks to the terminal. The session and its
store are held by every step: they are files of the trip, but no steps, so calls of them are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import FrameType

KNOW_NOTHING = ("common", "errors", "options", "codec", "corpus")
TERMINAL = ("cli/out.py", "cli/terminal.py", "cli/progress.py")
HELD = ("session/session.py", "session/identity.py", "cache/store.py", "retrieval/finder.py")
TEXT = "The mill at Orrin was built by Ada Brook in 1842. It ground barley for the harbour until the flood of 1911."


@dataclass(frozen=True, slots=True)
class Trip:
    """A call path through the rooms.

    Attributes
    ----------
    about : what is on its way.
    through : the rooms that the trip leads through.
    start, end : functions, as `file:name`; the trip is what is called from the start of one to the return of the
        other. "" for the command itself.
    beyond : functions at which another trip begins.
    """

    about: str
    command: str
    through: tuple[str, ...]
    start: str = ""
    end: str = ""
    beyond: tuple[str, ...] = ()


TRIPS = {
    "question": Trip(
        "a question, from the command to the first token",
        "query",
        ("cli", "session", "query"),
        end="model/generate.py:first_token",
        beyond=("fusion/engine.py:fuse",),
    ),
    "record": Trip(
        "a record, from the store to attention (read, decoded, placed, computed with)",
        "query",
        ("fusion",),
        start="fusion/engine.py:fuse",
        end="fusion/engine.py:fuse",
    ),
    "document": Trip(
        "a document, from the command to its records in the store",
        "ingest",
        ("cli", "ingest", "records"),
        end="cache/writer.py:commit_file",
    ),
}


@dataclass(slots=True)
class Tracer:
    """Recorder of calls between files, in all threads."""

    trip: Trip
    root: str
    entries: dict[str, dict[str, None]] = field(default_factory=dict)  # file: the files that enter it, in order
    _open: bool = False
    _done: bool = False
    _beyond: dict[int, int] = field(default_factory=dict)  # thread: how many `beyond` are on its stack

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Record a call or a return; `sys.setprofile` calls this."""
        if event not in ("call", "return") or self._done or (here := self._file(frame)) is None:
            return
        name, thread = f"{here}:{frame.f_code.co_name}", threading.get_ident()
        if event == "return":
            self._done = self._open and self._is(name, self.trip.end)
            if any(self._is(name, other) for other in self.trip.beyond):
                self._beyond[thread] -= 1
            return
        self._open = self._open or not self.trip.start or self._is(name, self.trip.start)
        if self._open and not self._beyond.get(thread) and self._is_ours(thread):
            self._enter(frame, here)
        if any(self._is(name, other) for other in self.trip.beyond):
            self._beyond[thread] = self._beyond.get(thread, 0) + 1

    def _enter(self, frame: FrameType, here: str) -> None:
        if frame.f_code.co_name == "__post_init__" or room_of(here) in KNOW_NOTHING or here in TERMINAL:
            return
        caller, above = "", frame.f_back
        while above is not None:
            there = self._file(above)
            if there == here or (there is not None and above.f_code.co_name in ("<module>", "__post_init__")):
                return  # entered already, or only imported or checked
            caller = caller or there or ""
            above = above.f_back
        if (room_of(caller) in self.trip.through and caller not in TERMINAL) or not self.entries:
            self.entries.setdefault(here, {})[caller] = None

    def _file(self, frame: FrameType) -> str | None:
        """The file of a function of kvtool: of a method, that of its object's class."""
        path, first = frame.f_code.co_filename, frame.f_code.co_varnames[:1]
        if not path.startswith(self.root):
            return None
        if first in (("self",), ("cls",)) and frame.f_code.co_argcount:
            held = frame.f_locals.get(first[0])
            kind = held if isinstance(held, type) else type(held)
            path = getattr(sys.modules.get(kind.__module__), "__file__", None) or path
        return path[len(self.root) :].removeprefix("core/") if path.startswith(self.root) else None

    def _is_ours(self, thread: int) -> bool:
        """Threads that were started beyond belong to the other trip."""
        return not self.trip.beyond or thread == threading.main_thread().ident

    @staticmethod
    def _is(name: str, wanted: str) -> bool:
        return bool(wanted) and name == wanted


def room_of(file: str) -> str:
    """Return the room of a file such as `query/answer.py`; a file outside all rooms is its own."""
    return file.partition("/")[0] if "/" in file else file.removesuffix(".py")


def follow(trip: Trip, argv: list[str]) -> Tracer:
    """Run a command, and note its trip. Raises SystemExit if the command fails."""
    import kvtool
    from kvtool.cli.app import main

    tracer = Tracer(trip, str(Path(kvtool.__file__).parent) + "/")
    with _profiled(tracer), redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
        code = main(argv)
    if code:
        raise SystemExit(f"kvtool {' '.join(argv)}: {told.getvalue()}")
    return tracer


@contextmanager
def _profiled(tracer: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def table(name: str, tracer: Tracer) -> str:
    """A trip as Markdown."""
    rows = tracer.entries
    lines = [f"## {name}: {tracer.trip.about}", "", "| | file | entered from |", "| --- | --- | --- |"]
    lines += [
        f"| {number} | {here} | {', '.join(filter(None, who)) or '-'} |"
        for number, (here, who) in enumerate(rows.items(), 1)
    ]
    most = max(len(who) for here, who in rows.items() if here not in HELD)
    return "\n".join([*lines, "", f"{len(rows)} files; no step is entered from more than {most}."])


def main() -> None:
    """Ingest two small documents, ask one question, and print the trips."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trips", nargs="*", default=[*TRIPS], help=f"some of {', '.join(TRIPS)}; all by default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true", help="print who enters which file, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus, store = Path(folder, "corpus"), str(Path(folder, "store"))
        corpus.mkdir()
        for number in range(2):
            (corpus / f"{number}.md").write_text(TEXT * (number + 1), encoding="utf-8")
        ingest = ["ingest", str(corpus), "--store", store, "--model", given.model]
        document = follow(TRIPS["document"], ingest)
        query = ["query", "Who built the mill?", "--store", store, "--max-tokens", "2", "--no-server"]
        found = {name: document if name == "document" else follow(TRIPS[name], query) for name in given.trips}
    if given.json:
        print(
            json.dumps(
                {name: {here: [*who] for here, who in tracer.entries.items()} for name, tracer in found.items()},
                indent=1,
            )
        )
    else:
        print("\n\n".join(table(name, tracer) for name, tracer in found.items()))


if __name__ == "__main__":
    main()
