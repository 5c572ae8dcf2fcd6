"""Where a single `kvtool query` spends its time, and what it reads and imports on the way.

    python samples/benchmarks/startup.py QUESTION --store STORE [--tree OLD --tree NEW] [--runs 5] [--server]

runs the command in a process of its own, tree after tree in turn, and prints medians: seconds of the clock and of the
processor, the parts of the clock's by the command's own timeline, the modules that are imported, and the megabytes
that are read by calls (what is mapped is none of these). A tree is a folder that holds the package; by default this
one. With `--server` a `kvtool serve` of the store (of the last tree) answers; then only the clock's time is taken, and
the server's own figure for the first token. On a busy machine the clock says nothing: there
`chrt -r 5 python samples/benchmarks/startup.py …` (root, Linux) makes other processes wait meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
_UP_S = 300.0  # for a server to come up
PARTS = ("import", "load model", "retrieve", "lay out", "generate")  # spans of the timeline, and `fuse: MODE`
# The process ends by `os._exit`: it prints what it has imported before that.
_LISTED = """
import json, os, sys
def tell(code, leave=os._exit):
    print(json.dumps(list(sys.modules)), file=sys.stderr, flush=True)
    leave(code)
os._exit = tell
from kvtool.__main__ import run
run()
"""


@dataclass(frozen=True)
class Once:
    """One run: seconds of the clock and of the processor, megabytes read by calls, milliseconds of each part."""

    wall: float
    cpu: float
    read: float | None
    parts: dict[str, float]


def command(given: argparse.Namespace) -> list[str]:
    return ["query", given.question, "--store", str(given.store.absolute()), "--max-tokens", str(given.max_tokens)]


def environment(tree: Path) -> dict[str, str]:
    """Return a shell's environment with Python's bytecode cache on, which this process's may turn off."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(tree.absolute())}


def run(given: argparse.Namespace, tree: Path) -> Once:
    """Ask once. Raises CalledProcessError where the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        spans = Path(folder) / "spans.json"
        words = [sys.executable, "-m", "kvtool", *command(given)]
        variables = environment(tree) | {"KVTOOL_TIMELINE": str(spans)}
        started = time.perf_counter()
        child = subprocess.Popen(words, env=variables, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert child.stderr is not None
        said = child.stderr.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        wall, read = time.perf_counter() - started, bytes_read(child.pid)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, words, stderr=said)
        return Once(wall, used.ru_utime + used.ru_stime, read, parts_of(json.loads(spans.read_text())))


@contextmanager
def serving(given: argparse.Namespace, tree: Path) -> Iterator[None]:
    """A server of the store that has its model loaded. Raises TimeoutError where it does not come up."""
    words = [sys.executable, "-m", "kvtool", "serve", "--store", str(given.store.absolute()), "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            words, env=environment(tree), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server,
    ):
        try:
            socket, end = Path(f"{os.path.realpath(given.store)}.sock"), time.monotonic() + _UP_S
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise TimeoutError("the server does not come up")
                time.sleep(0.1)
            beside(given, tree)
            yield
        finally:
            server.terminate()


def beside(given: argparse.Namespace, tree: Path) -> tuple[float, float]:
    """Ask the server once: seconds of the clock, and those to the first token as the server says."""
    words = [sys.executable, "-m", "kvtool", *command(given), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = subprocess.run(words, env=environment(tree), cwd=folder, capture_output=True, check=True)
        return time.perf_counter() - started, json.loads(done.stdout)["timing_ms"]["ttft"] / 1e3


def compare_beside(given: argparse.Namespace, trees: list[Path]) -> None:
    """Print what a question takes while a server has the model."""
    with serving(given, trees[-1]):
        runs = {tree: [beside(given, tree)] for tree in trees}  # the first one of a tree compiles what is kept then
        for _ in range(given.runs):
            for tree in trees:
                runs[tree].append(beside(given, tree))
    for tree in trees:
        print(f"{tree}, {given.runs} runs beside a server")
        print(f"  clock, s          {middle([wall for wall, _ in runs[tree][1:]])}")
        print(f"  first token, s    {middle([first for _, first in runs[tree][1:]])}")
        print(f"  the rest, s       {middle([wall - first for wall, first in runs[tree][1:]])}")


def bytes_read(process: int) -> float | None:
    """Return the megabytes that a process has read by calls; None if the system does not report them."""
    try:
        return int(re.findall(r"^rchar: (\d+)$", Path(f"/proc/{process}/io").read_text(), re.MULTILINE)[0]) / 1e6
    except (OSError, IndexError):
        return None


def parts_of(timeline: dict[str, list[dict[str, float | str]]]) -> dict[str, float]:
    """Return the milliseconds of the parts that one thread runs, and of the time before the import."""
    spans = [span for span in timeline["traceEvents"] if span["ph"] == "X"]
    begun = {str(span["name"]).partition(":")[0]: span for span in reversed(spans)}
    parts = {"before it": float(begun["import"]["ts"]) / 1e3}
    return parts | {name: float(begun[name]["dur"]) / 1e3 for name in (*PARTS[:-1], "fuse", PARTS[-1])}


def imported(given: argparse.Namespace, tree: Path) -> list[str]:
    """The modules that one question imports."""
    words = [sys.executable, "-c", _LISTED, *command(given)]
    with tempfile.TemporaryDirectory() as folder:  # not the working folder's package
        done = subprocess.run(words, env=environment(tree), cwd=folder, capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stderr.splitlines()[-1])
    return names


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(tree: Path, runs: list[Once], modules: list[str]) -> None:
    print(f"{tree}, {len(runs)} runs")
    print(f"  clock, s          {middle([one.wall for one in runs])}")
    print(f"  processor, s      {middle([one.cpu for one in runs])}")
    for name in runs[0].parts:
        print(f"  {name + ', ms':<17} {statistics.median(one.parts[name] for one in runs):.0f}")
    if runs[0].read is not None:
        print(f"  read, MB          {statistics.median(one.read or 0.0 for one in runs):.1f}")
    packages = Counter(name.partition(".")[0] for name in modules).most_common(8)
    print(f"  modules           {len(modules)}: " + ", ".join(f"{name} {count}" for name, count in packages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--tree", type=Path, action="append", help="may be given several times")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--server", action="store_true", help="have a server of the store answer")
    given = parser.parse_args()
    trees = given.tree or [HERE]
    if given.server:
        compare_beside(given, trees)
        return
    modules = {tree: imported(given, tree) for tree in trees}  # and whatever is made once is made
    runs: dict[Path, list[Once]] = {tree: [] for tree in trees}
    for _ in range(given.runs):
        for tree in trees:
            runs[tree].append(run(given, tree))
    for tree in trees:
        report(tree, runs[tree], modules[tree])


if __name__ == "__main__":
    main()
