"""Work of child processes in the tests of faults, without torch: ``python storework.py STORE WORK …``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from kvtool.core.cache.store import Store  # noqa: E402
from kvtool.core.errors import KvtoolError  # noqa: E402
from kvtool.core.evaluate.measures import keep_audit  # noqa: E402
from tests.chaos.children import kill_at  # noqa: E402
from tests.stores import LAYERS, add_file, check_file, id_of  # noqa: E402


def say(word: str) -> None:
    """One line that the parent waits for."""
    os.write(1, word.encode() + b"\n")


def add(store: Store, first: str, count: str, chunks: str = "2", dim: str = "16") -> None:
    """Files ``f<first>`` …, each said after its commit returned: the oracle of the kill test."""
    with store.writer(wait=10) as writer:
        say("start")
        for number in range(int(first), int(first) + int(count)):
            add_file(writer, f"f{number}", [f"f{number}.{chunk}" for chunk in range(int(chunks))], int(dim))
            say(f"f{number}")


def hold(store: Store, seconds: str) -> None:
    """Hold the writer lock."""
    with store.writer():
        say("held")
        time.sleep(float(seconds))


def lock(store: Store, wait: str) -> None:
    """Take the writer lock once."""
    say("trying")
    with store.writer(float(wait)):
        say("got it")


def watch(store: Store, wanted: str) -> None:
    """A reader from before the growth sees all of it, while the writer still writes."""
    say("start")
    deadline = time.monotonic() + 20
    while store.file(wanted) is None and time.monotonic() < deadline:
        check_file(store, "f0", dim=256)
    check_file(store, wanted, dim=256)


def read(store: Store, *paths: str) -> None:
    """Read everything there is; damage is reported by the store's errors, never by a signal."""
    store.stats()
    for path in paths or store.sources():
        document = store.document(path)
        for ref in document.chunks if document else ():
            for layer in range(LAYERS):
                store.read_kv(ref.chunk_id, "raw", layer)
    say(f"{len(store.sources())} {store.read_only} {store.has_chunk(id_of('f0.0'))}")


def audits(store: Store, word: str, count: str) -> None:
    """Keep audits next to the records."""
    from tests.evaluate.test_audits import made  # imports torch, which a small address space has no room for

    say("start")
    for number in range(int(count)):
        if not keep_audit(store, "model", made(number, question=word)):
            say("not kept")


def send(store: Store, url: str, method: str, step: str) -> None:
    """Push, and be killed at a step of a method of the shared store."""
    from kvtool.core.remote import blobs as leases
    from kvtool.core.remote import send as sending
    from kvtool.core.remote.options import PushOptions
    from kvtool.core.remote.push import push

    sending.PACK_BYTES = 1
    leases.LEASES["sweep"] = 0.4  # some stores keep the time themselves; the next push waits for a dead one
    with closing(leases.open_blobs(url)) as blobs:
        kill_at(int(step), (type(blobs), method))
        push(store, blobs, PushOptions(delete=True))


def receive(path: Path, url: str, method: str, step: str) -> None:
    """Pull, and be killed at a step of a method of the writer."""
    from kvtool.core.cache.writer import Writer
    from kvtool.core.remote.blobs import open_blobs
    from kvtool.core.remote.pull import pull

    kill_at(int(step), (Writer, method))
    with closing(open_blobs(url)) as blobs:
        pull(path, blobs)


WORKS = {work.__name__: work for work in (add, hold, lock, watch, read, audits, send)}


def main() -> int:
    try:
        if sys.argv[2] == "receive":
            receive(Path(sys.argv[1]), *sys.argv[3:])
            return 0
        opened = Store.create_or_open if sys.argv[2] == "add" else Store.open
        with opened(Path(sys.argv[1])) as store:
            WORKS[sys.argv[2]](store, *sys.argv[3:])
    except KvtoolError as error:
        sys.stderr.write(f"{error.message}\n{error.hint}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
