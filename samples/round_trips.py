"""What a bucket that is far away costs: requests, and how many of them wait for one another.

    .venv/bin/python samples/round_trips.py --store STORE [--ms 25] [--level raw 3]

In front of moto's S3 stands a proxy that holds all bytes for so long in each direction; a connection is there at once,
since a bucket keeps them open, and moto does not. A request's *round* is one more than the highest round of the answers
that had come when it was sent: rounds are what latency multiplies. The commands are kvtool's own, each in a process of
its own; the store needs the levels that are asked for.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from front_asked import URL, bucket

QUESTION = "What is the larger reflector at the Kellhaven Observatory?"
KVTOOL = [sys.executable, "-P", "-m", "kvtool"]  # -P: nothing in the working directory is run

Seen = tuple[float, float]  # a request's first byte is sent, its answer's last byte is there


class Distance:
    """A TCP proxy in front of a port that adds a delay to each direction, whatever the rate.

    Attributes
    ----------
    port : where to connect instead.
    """

    def __init__(self, port: int, delay: float) -> None:
        self._to, self._delay = port, delay
        self._events = list[tuple[float, int, bool]]()  # when, of which connection, whether it is the client's
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def seen(self) -> list[Seen]:
        """The requests since the last call, by the time they were sent."""
        events, self._events = self._events, []
        found = list[Seen]()
        for number in {number for _, number, _ in events}:
            mine = sorted((when, is_clients) for when, each, is_clients in events if each == number)
            begins = [at for at, (_, is_clients) in enumerate(mine) if is_clients and (not at or not mine[at - 1][1])]
            found += [(mine[begin][0], mine[end - 1][0]) for begin, end in pairwise([*begins, len(mine)])]
        return sorted(found)

    def _accept(self) -> None:
        with suppress(OSError):
            for number in range(1 << 30):
                client, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                for one in (client, there):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._forward(client, there, number, True)
                self._forward(there, client, number, False)

    def _forward(self, one: socket.socket, other: socket.socket, number: int, is_clients: bool) -> None:
        """Send on what comes, each piece when its time has come."""
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def receive() -> None:
            data = b"?"
            while data:
                try:
                    data = one.recv(1 << 16)
                except OSError:
                    data = b""
                came = time.monotonic()
                if data and is_clients:
                    self._events.append((came, number, True))
                held.put((came + self._delay, data))

        def send() -> None:
            with suppress(OSError):
                while True:
                    due, data = held.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    if not data:
                        other.shutdown(socket.SHUT_WR)
                        return
                    if not is_clients:
                        self._events.append((time.monotonic(), number, False))
                    other.sendall(data)

        for work in (receive, send):
            threading.Thread(target=work, daemon=True).start()


def rounds(seen: list[Seen]) -> int:
    """How many requests wait for one another."""
    of: list[tuple[float, int]] = []  # when an answer was there, its round
    for begin, end in seen:
        of.append((end, 1 + max((number for there, number in of if there <= begin), default=0)))
    return max((number for _, number in of), default=0)


def at_once(seen: list[Seen]) -> int:
    """The most requests in flight."""
    return max((sum(begin <= at < end for begin, end in seen) for at, _ in seen), default=0)


def waited(seen: list[Seen]) -> float:
    """Seconds in which any was in flight."""
    total = until = 0.0
    for begin, end in seen:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Far:
    """Runs kvtool against the bucket, with the proxy between, and prints a row for each run."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._delay, self._folder = given.ms / 1e3, folder
        self._distance = Distance(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), self._delay)
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self._distance.port}"

    def run(self, home: str, *words: object) -> None:
        """Without a row."""
        command = [*KVTOOL, *map(str, words)]
        place = os.environ | {"KVTOOL_HOME": str(self._folder / home), "KVTOOL_REMOTE_TIMEOUT": "60"}
        done = subprocess.run(command, capture_output=True, text=True, env=place, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)

    def row(self, title: str, home: str, *words: object) -> None:
        """Of what is asked of the bucket meanwhile."""
        self._distance.seen()
        self.run(home, *words)
        seen = self._distance.seen()
        trips = waited(seen) / (2 * self._delay)
        print(f"| {title} | {len(seen)} | {at_once(seen)} | {rounds(seen)} | {trips:.1f} |", flush=True)

    @contextmanager
    def copied(self, home: str) -> Iterator[str]:
        """A home like another one."""
        shutil.copytree(self._folder / home, self._folder / "copy")
        yield "copy"
        shutil.rmtree(self._folder / "copy")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ms", type=float, default=25.0, help="of delay in each direction")
    parser.add_argument("--level", nargs="+", default=["raw", "3"])
    parser.add_argument("--question", default=QUESTION)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, bucket(Path(name)):
        folder = Path(name)
        measure(Far(given, folder), given, Path(shutil.copytree(given.store, folder / "store")), folder / "note.md")


def measure(far: Far, given: argparse.Namespace, store: Path, note: Path) -> None:
    """All rows; the store is a copy. A question has the store opened, and nothing of its KV."""
    ingest = ("ingest", note, "--store", store)
    note.write_text("# A note\n\nThe reflector was cleaned on Monday.", encoding="utf-8")
    subprocess.run([*KVTOOL, *map(str, ingest)], check=True, capture_output=True)
    print("| what | requests | at once | rounds | in flight, round trips |\n| --- | --- | --- | --- | --- |")
    far.row("push of all", "pushing", "store", "push", URL, "--store", store)
    far.row("push of nothing new", "pushing", "store", "push", URL, "--store", store)
    ask = ("query", given.question, "--store", URL, "--no-server", "--max-tokens", 1, "--top-k", 5)
    far.row("store opened, nothing of it here", "reader", "inspect", "--store", URL)
    far.row("store opened again", "reader", "inspect", "--store", URL)
    for level in given.level:
        with far.copied("reader") as home:
            far.row(f"question over five chunks at {level}", home, *ask, "--level", level)
            far.row("the same again", home, *ask, "--level", level)
    note.write_text("# A note\n\nThe reflector was cleaned on Tuesday.", encoding="utf-8")
    subprocess.run([*KVTOOL, *map(str, ingest)], check=True, capture_output=True)
    far.row("push of a changed document", "pushing", "store", "push", URL, "--store", store)
    far.row("store opened after it", "reader", "inspect", "--store", URL)


if __name__ == "__main__":
    main()
