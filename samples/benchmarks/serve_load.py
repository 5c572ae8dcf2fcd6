"""Many clients at one `kvtool serve`: errors, answers held against serial ones, times to the first token, throughput.

    python samples/benchmarks/serve_load.py                                  # 32 clients x 20, tiny; 4 x 20, smollm2
    python samples/benchmarks/serve_load.py --only tiny --clients 8 --requests 5

Each question is answered once without a server; every streamed answer has to be that. Then one client asks them one
after the other, and all clients ask at once, each another question first. Times are the clients', in threads
outside the server's process. Last, a long prompt is asked for while an answer is read: the reader's wait between two
pieces shows whether the prompt stops it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import kvtool  # noqa: E402

QUESTIONS = [
    json.loads(line)["question"] for line in (ROOT / "samples/questions.jsonl").read_text(encoding="utf-8").splitlines()
]
READ, MANY, ROUNDS = 400, 20, 5  # tokens of the answer read, chunks of the long prompt meanwhile, and how often
PATIENCE = 600.0  # seconds
COLUMNS = (
    *("clients", "answers", "errors", "other than serial", "TTFT p50 ms", "p95", "whole p50 ms", "p95"),
    *("answers/s", "tokens/s"),
)


@dataclass(frozen=True)
class Load:
    """The requests to one model."""

    name: str
    clients: int
    requests: int
    max_tokens: int


LOADS = (Load("tiny", 32, 20, 32), Load("smollm2", 4, 20, 32))


@dataclass(frozen=True)
class Told:
    """One streamed answer, as its client has seen it; times in seconds, of the whole from the request on."""

    question: str
    text: str
    first: float
    whole: float
    tokens: int
    prompt: int


@dataclass
class Usage:
    """What a process holds, looked at five times a second: resident memory in MB, and open file descriptors."""

    process: int
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self) -> None:
        pages = int(Path(f"/proc/{self.process}/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
        self.descriptors.append(len(os.listdir(f"/proc/{self.process}/fd")))

    @contextmanager
    def watched(self) -> Iterator[None]:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.2):
                self.look()

        self.look()
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            time.sleep(2)  # connections are closed by now
            self.look()

    def __str__(self) -> str:
        memory, open_files = self.memory, self.descriptors
        return (
            f"memory before, at most and after: {memory[0]:,.0f}, {max(memory):,.0f}, {memory[-1]:,.0f} MB; "
            f"file descriptors: {open_files[0]}, {max(open_files)}, {open_files[-1]}"
        )


@contextmanager
def serving(
    store: Path, max_tokens: int, parallel: int, home: Path, *more: str, usage: Usage | None = None
) -> Iterator[tuple[str, int, str]]:
    """A server in a process of its own: host, port, key. `more`: further flags. `usage` is told its process."""
    environment = {**os.environ, "KVTOOL_HOME": str(home)}
    command = [sys.executable, "-m", "kvtool", "serve", "--store", str(store), "--port", "0"]
    command += ["--max-tokens", str(max_tokens), "--parallel", str(parallel), "--queue", "1000"]
    command += ["--request-timeout", f"{PATIENCE}", "--request-log", str(home / "log.jsonl"), "--no-socket", *more]
    home.mkdir(exist_ok=True)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"ready on http://([\d.]+):(\d+)", said)):
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"the server has not begun: {said}")
                said += line
            if usage is not None:
                usage.process = process.pid
            yield found[1], int(found[2]), (home / "data/serve.key").read_text().strip()
        finally:
            process.terminate()


def ask(place: tuple[str, int, str], question: str, pieces: list[float] | None = None, **wanted: Any) -> Told:
    """Request one streamed answer.

    Parameters
    ----------
    pieces : receives the time of each piece, by `time.perf_counter`.
    wanted : more of the request.
    """
    host, port, key = place
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    body = json.dumps({"messages": [{"role": "user", "content": question}], "stream": True, **wanted})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began, first, text, facts = time.perf_counter(), None, "", {}
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:200]!r}")
        for event in events(response):
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            piece = event["choices"][0]["delta"].get("content", "")
            if piece and first is None:
                first = time.perf_counter() - began
            if piece and pieces is not None:
                pieces.append(time.perf_counter())
            text, facts = text + piece, event.get("kvtool", facts)
    whole, counts = time.perf_counter() - began, facts["tokens"]
    return Told(question, text, whole if first is None else first, whole, counts["generated"], counts["prompt"])


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)
    raise RuntimeError("the stream has no end")


@dataclass
class Measured:
    """Answers of some clients; `seconds`: from the first request to the last answer."""

    told: list[Told] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self, clients: int, expected: dict[str, str]) -> str:
        """A line of the table."""
        firsts, wholes = sorted(one.first for one in self.told), sorted(one.whole for one in self.told)
        other = sum(one.text != expected[one.question] for one in self.told)
        tokens = sum(one.tokens for one in self.told)
        cells = (
            f"{clients}",
            f"{len(self.told) + len(self.errors)}",
            f"{len(self.errors)}",
            f"{other}",
            *(f"{1e3 * share(values, at):,.0f}" for values in (firsts, wholes) for at in (0.5, 0.95)),
            f"{len(self.told) / self.seconds:.2f}",
            f"{tokens / self.seconds:,.0f}",
        )
        return f"| {' | '.join(cells)} |"


def share(values: Sequence[float], at: float) -> float:
    """A quantile of sorted values, the nearest that was measured."""
    return values[min(len(values) - 1, round(at * (len(values) - 1)))] if values else float("nan")


def make_store(load: Load, folder: Path) -> Path:
    """A store of the sample corpus."""
    model = load.name
    if model == "tiny":
        from tests.families import save_tiny

        model = str(save_tiny("llama", folder / "model"))
    store = folder / "store"
    with kvtool.open(store, model=model) as cache:
        cache.ingest(ROOT / "samples/corpus", chunk_tokens=128, lead_in="prefix" if load.name == "tiny" else None)
    return store


def serial(store: Path, questions: Sequence[str], max_tokens: int) -> dict[str, str]:
    """Return one process's answers, one question after the other, without questions that retrieve nothing."""
    answers = {}
    with kvtool.open(store) as cache:
        for question in questions:
            try:
                answers[question] = cache.query(question, max_tokens=max_tokens).answer
            except kvtool.KvtoolError as error:
                if error.exit_code != 1:
                    raise
    return answers


def measure(place: tuple[str, int, str], clients: int, turns: Sequence[Sequence[str]]) -> Measured:
    """Let each client ask its questions one after the other, all clients at once."""
    found = Measured()

    def one(questions: Sequence[str]) -> None:
        for question in questions:
            try:
                found.told.append(ask(place, question))
            except Exception as error:
                found.errors.append(f"{type(error).__name__}: {error}")

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, turns))
    found.seconds = time.perf_counter() - began
    return found


def pauses(place: tuple[str, int, str], question: str, long: dict[str, Any]) -> tuple[float, float, Told]:
    """Measure a reader's longest wait for the next piece of an answer: with no other client, and while a long prompt is
    computed to its first token; and return that prompt's answer."""
    quiet: list[float] = []
    read = {"max_tokens": READ, "temperature": 1.5, "seed": 1, "kvtool": {"fusion": "reuse"}}  # it ends late
    ask(place, question, quiet, **read)
    with ThreadPoolExecutor(1) as pool:
        pieces: list[float] = []
        reading = pool.submit(ask, place, question, pieces, **read)
        while not pieces and not reading.done():
            time.sleep(0.001)
        began = time.perf_counter()
        other = ask(place, question, max_tokens=1, kvtool=long)
        ended = began + other.first
        reading.result()
    beside = [after - before for before, after in pairwise(pieces) if after > began and before < ended]
    longest = max((after - before for before, after in pairwise(quiet)), default=float("nan"))
    return longest, max(beside, default=float("nan")), other


def paused(place: tuple[str, int, str], question: str) -> list[str]:
    """Measure the effect of a long prompt on an answer that is read: medians of a few."""
    found = [pauses(place, question, {"fusion": "full", "top_k": MANY}) for _ in range(ROUNDS)]
    alone, beside, first = (
        statistics.median(1e3 * value for value in values)
        for values in ([one[0] for one in found], [one[1] for one in found], [one[2].first for one in found])
    )
    return [
        f"While a prompt of {found[0][2].prompt:,} tokens comes to its first one (`full`, {first:,.0f} ms), who reads "
        f"an answer waits at most {beside:,.0f} ms for its next piece, {alone:,.0f} ms with nobody beside (medians of "
        f"{ROUNDS}).",
        "",
    ]


def fairness(place: tuple[str, int, str], questions: Sequence[str]) -> list[str]:
    """Measure what one client with a long prompt and ten with short ones cost each other."""
    short = {"max_tokens": 8, "kvtool": {"fusion": "reuse", "top_k": 1}}
    long = {"max_tokens": 8, "kvtool": {"fusion": "full", "top_k": MANY}}

    def firsts(clients: int, wanted: dict[str, Any]) -> float:
        with ThreadPoolExecutor(clients) as pool:
            asked = [questions[number % len(questions)] for number in range(clients * ROUNDS)]
            return 1e3 * statistics.median(
                told.first for told in pool.map(lambda one: ask(place, one, **wanted), asked)
            )

    alone, single = firsts(10, short), firsts(1, long)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(firsts, clients, wanted) for clients, wanted in ((10, short), (1, long))]
        together = [one.result() for one in both]
    return [
        f"Ten clients with short prompts get their first token after {alone:,.0f} ms, and {together[0]:,.0f} ms beside "
        f"one with a long prompt; that one after {single:,.0f} ms, and {together[1]:,.0f} ms beside them (medians).",
        "",
    ]


def run(load: Load) -> list[str]:
    """The table of one model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["KVTOOL_HOME"] = str(folder / "home")
        store = make_store(load, folder)
        expected = serial(store, QUESTIONS[: load.requests * 2], load.max_tokens)
        asked = list(expected)[: load.requests]
        turns = [
            [asked[(client + turn) % len(asked)] for turn in range(load.requests)] for client in range(load.clients)
        ]
        usage = Usage(0)
        with serving(store, load.max_tokens, load.clients, folder / "served", usage=usage) as place:
            measure(place, 1, [asked])  # what is read once, and compiled
            alone = measure(place, 1, [asked])
            with usage.watched():
                together = measure(place, load.clients, turns)
            waits = [*paused(place, asked[0]), *fairness(place, asked)]
    for error in sorted({*alone.errors, *together.errors}):
        print(f"error: {error}", file=sys.stderr)
    gain = (len(together.told) / together.seconds) / (len(alone.told) / alone.seconds)
    times = statistics.median(one.first for one in together.told) / statistics.median(one.first for one in alone.told)
    return [
        f"## {load.name}: {load.clients} clients, {load.requests} questions each, answers of {load.max_tokens} tokens",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        alone.row(1, expected),
        together.row(load.clients, expected),
        "",
        f"{load.clients} clients together get {gain:.2f} times the answers a second of one; their first token comes "
        f"after {times:.1f} times as long, waiting for others' prompts included. The server's {usage}.",
        "",
        *waits,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[load.name for load in LOADS])
    parser.add_argument("--clients", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--max-tokens", type=int)
    given = parser.parse_args()
    tables: list[str] = []
    for load in LOADS:
        if given.only in (None, load.name):
            one = Load(
                load.name,
                given.clients or load.clients,
                given.requests or load.requests,
                given.max_tokens or load.max_tokens,
            )
            tables += run(one)
    print("\n".join(tables))


if __name__ == "__main__":
    main()
