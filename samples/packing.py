"""What a question asks of a shared store, packed and a value a record: requests, bytes, when its context is there.

    sudo .venv/bin/python samples/packing.py --store STORE [--level raw 3] [--mbps 200] [--chunks 5]

Over a Redis and an S3 (moto) behind a shaped link, and a folder of this machine; the link is that of `stream_link.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

from stream_link import HERE, SERVERS, shaped_link, there

from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
from kvtool.core.remote import send
from kvtool.core.remote.opening import open_shared
from kvtool.core.remote.push import push
from kvtool.core.remote.urls import open_blobs
from kvtool.lab.simulator.traces import LinkTrace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--level", nargs="+", default=["raw", "3"])
    parser.add_argument("--mbps", type=float, default=200.0)
    parser.add_argument("--chunks", type=int, default=5)
    given = parser.parse_args()
    print("| over | KV values | push: requests, s | opening: requests, MB | level | requests | MB | context there, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    trace = LinkTrace("", "", ((0.0, given.mbps),))
    for kind in (*SERVERS, "folder"):
        for packed in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["KVTOOL_HOME"] = folder
                if kind == "folder":
                    measure(kind, packed, f"file://{folder}/shared", Path(folder), given)
                    continue
                with shaped_link() as shape, there(kind, Path(folder)) as url:
                    measure(kind, packed, url, Path(folder), given, shape=lambda: shape(trace))
    return 0


def measure(
    kind: str, packed: bool, url: str, folder: Path, given: argparse.Namespace, shape: Callable[[], object] = int
) -> None:
    """A row for every level."""
    with closing(open_blobs(url)) as blobs, Store.open(given.store) as store:
        with mock.patch.object(send, "MOST_BYTES", send.MOST_BYTES if packed else 0):
            asked, started = asked_of(kind, url, folder), time.perf_counter()
            push(store, blobs)
            pushed = f"{asked_of(kind, url, folder) - asked:,}, {time.perf_counter() - started:.0f}"
        values = sum(1 for name in blobs.names() if name.startswith(("pack/", "kv/")))
        wanted = [chunk for chunk in sorted(store.chunk_ids()) if {*given.level} <= {*store.levels(chunk)}]
    wanted = wanted[:: max(1, len(wanted) // given.chunks)][: given.chunks]  # of several documents
    shape()
    asked, received = asked_of(kind, url, folder), bytes_received()
    with open_shared(url, timeout=60) as store:
        opened = f"{asked_of(kind, url, folder) - asked:,}, {(bytes_received() - received) / 1e6:.2f}"
        for level in given.level:
            asked, received, started = asked_of(kind, url, folder), bytes_received(), time.perf_counter()
            for layer in range(store.chunk_info(wanted[0]).layers):
                for found in store.read_layer(wanted, level, layer):
                    assert isinstance(found, tuple)
            seconds = time.perf_counter() - started
            fetched = asked_of(kind, url, folder) - asked, (bytes_received() - received) / 1e6
            shown = ("", "") if kind == "folder" else (f"{fetched[0]:,}", f"{fetched[1]:.2f}")
            opened = "" if kind == "folder" else opened
            print(
                "|", " | ".join((kind, f"{values:,}", pushed, opened, level, *shown, f"{seconds:.2f}")), "|", flush=True
            )
    shutil.rmtree(folder / "cache", ignore_errors=True)


def asked_of(kind: str, url: str, folder: Path) -> int:
    """Requests, or commands, that the server has got."""
    if kind == "s3":
        return sum(b" HTTP/1.1" in line for line in (folder / "server.log").read_bytes().splitlines())
    if kind == "redis":
        import redis

        with redis.Redis.from_url(url) as client:
            return int(client.info("stats")["total_commands_processed"])
    return 0


def bytes_received() -> int:
    """Bytes that came over the link, headers included."""
    counted = Path(f"/sys/class/net/{HERE}/statistics/rx_bytes")
    return int(counted.read_text()) if counted.exists() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvtoolError as error:
        raise SystemExit(f"error: {error.message}") from None
