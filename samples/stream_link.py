"""The streaming policy over a real Redis or S3 behind a shaped link, beside what the simulator says of the same trace.

    sudo .venv/bin/python samples/stream_link.py --store STORE [--over s3] [--trace FILE …] [--slo-ms 1000]

The link is a pair of interfaces into a network namespace, shaped by `tc` as the trace says: root on Linux, with
iproute2, and redis-server or moto. No model is run; what computing a chunk takes is given
(`--prefill-tokens-per-second`), beside the fetching (C in what is told of levels) and after it (t).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvtool.core.cache.link import Link
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW, exact, known
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.query.ahead import Ended
from kvtool.core.query.fetching import Driver
from kvtool.core.query.streaming import rungs_of
from kvtool.core.remote.opening import open_shared
from kvtool.core.remote.push import push
from kvtool.core.remote.urls import open_blobs
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.streaming.both_ends import BothEnds
from kvtool.core.streaming.estimate import make_estimator
from kvtool.core.streaming.ladder import Ladder
from kvtool.core.streaming.policy import Task
from kvtool.lab.simulator.simulate import simulate
from kvtool.lab.simulator.traces import LinkTrace, read_trace

NAMESPACE, HERE, THERE, NET = "kvtool-link", "kvtool-here", "kvtool-there", "10.213.7"
PORT = 6391
HEADERS = 1514 / 1448  # bytes on the wire for a byte of a full TCP segment: a trace speaks of the latter
QUEUE = "limit 4mb"
COMPUTED = "computed"
SHORT = {"raw": "r", "lossless": "l", COMPUTED: "C"}
OWN_TRACES = (
    LinkTrace("steady-200", "steady", ((0.0, 200.0),)),
    LinkTrace("steady-50", "steady", ((0.0, 50.0),)),
    LinkTrace("drop", "drop", ((0.0, 200.0), (0.25, 30.0))),
    LinkTrace("recovery", "recovery", ((0.0, 30.0), (0.4, 300.0))),
    LinkTrace("far", "latency", ((0.0, 100.0),), latency_ms=40.0),
)


class Beside:
    """A processor that takes the time it is said to, and is never late; decoding is no part of the link."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds, self._since, self._stopped = seconds, 0.0, False
        self.computing: int | None = None

    def put(self, *known: object) -> None:
        return None

    def compute(self, number: int, segment: object) -> None:
        self.computing, self._since, self._stopped = number, time.perf_counter(), False

    def stop(self) -> None:
        self._stopped = True

    def ended(self) -> Ended | None:
        if self.computing is None or not (self._stopped or self._left() <= 0):
            return None
        number, self.computing = self.computing, None
        return Ended(number, time.perf_counter() - self._since, not self._stopped)

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._left())))

    def finish(self) -> None:
        self._stopped = True

    def _left(self) -> float:
        return 0.0 if self.computing is None else self._since + self._seconds(self.computing) - time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="compressed to several levels")
    parser.add_argument("--over", choices=SERVERS, default="redis", help="what stands at the far end")
    parser.add_argument("--trace", type=Path, action="append", help="default: five of its own")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--slo-ms", type=float, default=1000.0, help="0: none, all is fetched as it is")
    parser.add_argument("--prefill-tokens-per-second", type=float, default=4000.0)
    parser.add_argument("--one-end", action="store_true", help="compute nothing while the link fetches")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    traces = [read_trace(path) for path in given.trace] if given.trace else list(OWN_TRACES)
    with tempfile.TemporaryDirectory() as folder, shaped_link() as shape, there(given.over, Path(folder)) as url:
        os.environ["KVTOOL_HOME"] = folder
        with closing(open_blobs(url)) as blobs, Store.open(given.store) as store:
            push(store, blobs)
        ratios = [ratio for trace in traces if (ratio := measured(trace, shape, url, given, Path(folder)))]
    print(f"real / simulated: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


def measured(
    trace: LinkTrace, shape: Callable[[LinkTrace], object], url: str, given: argparse.Namespace, folder: Path
) -> float | None:
    """The ratio; None where this kernel cannot shape the link so."""
    try:
        return measure(trace, shape, url, given, folder)
    except subprocess.CalledProcessError as error:
        print(f"{trace.name:12} left out: {error.stderr.decode(errors='replace').strip()}")
        return None


def measure(
    trace: LinkTrace, shape: Callable[[LinkTrace], object], url: str, given: argparse.Namespace, folder: Path
) -> float:
    """Seconds until all is fetched, of both; returns their ratio."""
    real = []
    for _ in range(given.repeat):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        with open_shared(url, timeout=60) as store:
            link = store.link
            assert link is not None
            plan = plan_of(store, given.chunks)
            task = task_of(store, link, plan, given)
            policy = BothEnds(task, make_estimator("harmonic"))
            shape(trace)
            beside = Beside(task.alone)
            driver = Driver(link, plan.segments, policy, beside, time.perf_counter())  # type: ignore[arg-type]
            started = time.perf_counter()
            driver.run()
            levels = policy.levels | dict.fromkeys(policy.computed, COMPUTED)
            real.append((time.perf_counter() - started, sum(row["bytes"] for row in policy.log), levels))
        shape(LinkTrace("open", "", ((0.0, 20_000.0),)))
    policy = BothEnds(task, make_estimator("harmonic"))
    found = simulate(policy, task, trace)
    seconds, size, levels = sorted(real, key=lambda one: one[0])[len(real) // 2]
    fetched = "".join(SHORT.get(level, level or "t") for level in levels.values())
    expected = found.levels | dict.fromkeys(policy.computed, COMPUTED)
    wanted = "".join(SHORT.get(level, level or "t") for level in expected.values())
    print(
        f"{trace.name:12} real {seconds * 1e3:7.1f} ms {size / 1e6:6.2f} MB levels {fetched}   "
        f"simulated {found.ready_s * 1e3:7.1f} ms {found.bytes / 1e6:6.2f} MB levels {wanted}   "
        f"ratio {seconds / found.ready_s:.3f}"
    )
    return seconds / found.ready_s


def plan_of(store: Store, count: int) -> Plan:
    """A prompt of some chunks that have the most levels."""
    ids = sorted(store.chunk_ids(), key=lambda chunk: (-len(store.levels(chunk)), chunk))[:count]
    chunks = [Candidate(store.chunk_info(chunk).token_ids, chunk, level=RAW) for chunk in ids]  # type: ignore[union-attr]
    return build_plan(Candidate(()), chunks, (1,))


def task_of(store: Store, link: Link, plan: Plan, given: argparse.Namespace) -> Task:
    """Of every level whose loss is known."""
    losses = dict.fromkeys(exact(), 0.0) | MeasuredLosses(store).at_most()
    allowed = {level: losses[level] for level in known(losses)}
    ladders = tuple(
        Ladder.of(number, len(segment.ids), rungs_of(link, segment, allowed))
        for number, segment in enumerate(plan.segments[:-1])
        if segment.ids
    )
    tokens = {ladder.chunk: ladder.tokens for ladder in ladders}

    def compute(text: frozenset[int]) -> float:
        return 0.05 + sum(tokens[chunk] for chunk in text) / given.prefill_tokens_per_second

    def alone(chunk: int) -> float:
        return math.inf if given.one_end else tokens[chunk] / given.prefill_tokens_per_second

    return Task(ladders, compute, given.slo_ms / 1e3 or None, alone=alone)


# ---- the link ----


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def shaped_link() -> Iterator[Callable[[LinkTrace], object]]:
    """A link into a namespace; the function that it yields lets a trace begin."""
    try:
        ip("ip", "netns", "add", NAMESPACE)
        ip("ip", "link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAMESPACE)
        ip("ip", "addr", "add", f"{NET}.1/24", "dev", HERE)
        ip("ip", "link", "set", HERE, "up")
        ip("ip", "-n", NAMESPACE, "addr", "add", f"{NET}.2/24", "dev", THERE)
        # Packets as they go over a wire: a larger one that waits when the bucket shrinks would never fit into it.
        ip("ip", "-n", NAMESPACE, "link", "set", THERE, "up", "gso_max_segs", "1")
        tc("add", THERE, *tbf(20_000.0))
        yield begin
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise SystemExit(f"no link can be made here: {said.decode(errors='replace').strip()} (are you root?)") from None
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", HERE], check=False, capture_output=True)


def tc(what: str, device: str, *words: str) -> None:
    ip("ip", "netns", "exec", NAMESPACE, "tc", "qdisc", what, "dev", device, "root", *words)


def tbf(mbps: float) -> list[str]:
    burst = max(32_768, int(mbps * 1e6 / 8 / 250))  # what passes between two ticks of the kernel's clock
    return ["tbf", "rate", f"{mbps * HEADERS:.3f}mbit", "burst", str(burst), *QUEUE.split()]


def begin(trace: LinkTrace) -> None:
    """Set the first step now and the others when their time comes."""
    if trace.latency_ms:
        ip("tc", "qdisc", "replace", "dev", HERE, "root", "netem", "delay", f"{trace.latency_ms}ms")
    else:
        subprocess.run(["tc", "qdisc", "del", "dev", HERE, "root"], check=False, capture_output=True)
    tc("change", THERE, *tbf(trace.steps[0][1]))
    started = time.perf_counter()

    def go_on() -> None:
        for second, mbps in trace.steps[1:]:
            time.sleep(max(0.0, started + second - time.perf_counter()))
            tc("change", THERE, *tbf(mbps))

    threading.Thread(target=go_on, daemon=True).start()


def redis_server(folder: Path) -> list[str]:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed: apt-get install redis-server")
    command = [program, "--bind", f"{NET}.2", "--port", str(PORT), "--save", "", "--protected-mode", "no"]
    return [*command, "--dir", str(folder)]


def s3_server(folder: Path) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", f"{NET}.2", "-p", str(PORT)]


SERVERS = {"redis": redis_server, "s3": s3_server}


@contextmanager
def there(kind: str, folder: Path) -> Iterator[str]:
    """An empty server at the far end; what it says of itself, its requests among that, is in `server.log`."""
    with (folder / "server.log").open("wb") as log:
        command = ["ip", "netns", "exec", NAMESPACE, *SERVERS[kind](folder)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        for _ in range(3000):
            try:
                socket.create_connection((f"{NET}.2", PORT), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        if kind == "s3":
            endpoint = f"http://{NET}.2:{PORT}"
            os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=30).close()
        yield "s3://bucket/kv" if kind == "s3" else f"redis://{NET}.2:{PORT}/0"
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvtoolError as error:
        raise SystemExit(f"error: {error.message}") from None
