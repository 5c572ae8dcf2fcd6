"""What pushes, pulls and questions ask of a shared store of very many chunks: requests, bytes, seconds, memory.

    python samples/shared_scale.py STORE [STORE ...]     stores that `samples/scale.py make` wrote: FOLDER/10000/store
    python samples/shared_scale.py --catalogue 1000000   the catalogue of so many chunks alone, and a change of twenty

Each step is a process of its own, on a copy of the store, over a folder. Requests are those that an object store would
get for it: counted where kvtool asks for values, as its own reader joins neighbouring parts, and a list for each
thousand sizes. Two machines are two cache folders.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from kvtool.core.cache import tree
from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.identity import chunk_id
from kvtool.core.cache.record import encode_record
from kvtool.core.cache.store import Store
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Level, Pack, Place, digest_of
from kvtool.core.remote.folder import FolderBlobs
from kvtool.core.remote.object_reader import spans_of
from kvtool.core.remote.opening import open_shared
from kvtool.core.remote.push import push
from kvtool.core.remote.shards import pack_root, sharded

CHUNKS = 10  # of the file that is changed
STEPS = ("push", "push again", "open", "open again", "change", "push the change", "open after it")
_LIST = 1000  # names in an answer
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="*")
    parser.add_argument("--catalogue", type=int, nargs="*", default=[], help="chunks of catalogues without a store")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for copies and the shared store; it is left there")
    given = parser.parse_args()
    if given.step:
        print(json.dumps(taken(given.step, given.stores[0], f"file://{given.folder / 'shared'}")))
        return
    if given.catalogue:
        print("| chunks | shards | MB | MB of the root | changed shards | MB of these | CPU s | of a change | MiB |")
        print("| --- " * 9 + "|")
        for chunks in given.catalogue:
            print(catalogue_row(chunks), flush=True)
        return
    print("| chunks | step | requests | of them reads | MB sent | MB read | pages read | CPU s | peak MiB |")
    print("| --- " * 9 + "|")
    for store in given.stores:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            steps(store, Path(folder))


def steps(store: Path, folder: Path) -> None:
    shutil.copytree(store, folder / "store")
    for step in STEPS:
        machine = "reader" if step.startswith("open") else "writer"
        environment = os.environ | {"KVTOOL_CACHE": str(folder / machine), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(folder / "store"), "--step", step, "--folder", str(folder)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        if step != "change":
            print("|", " | ".join(str(row[name]) for name in row), "|", flush=True)


def taken(step: str, path: Path, url: str) -> dict[str, object]:
    counted, started = Requests(), time.process_time()
    counted.watch()
    with Store.open(path) as store:
        chunks = len(store.chunk_ids())
        if step == "change":
            change(store)
        elif step.startswith("push"):
            with closing(FolderBlobs(Path(url.removeprefix("file://")))) as blobs:
                assert push(store, blobs).damaged == []
    if step.startswith("open"):
        open_shared(url).close()
    return {
        "chunks": f"{chunks:,}",
        "step": step,
        "requests": f"{sum(counted.of.values()):,}",
        "reads": f"{counted.of['get']:,}",
        "sent": f"{counted.sent / 1e6:,.2f}",
        "read": f"{counted.read / 1e6:,.2f}",
        "pages": f"{counted.of_store:,}",
        "cpu": f"{time.process_time() - started:,.1f}",
        "peak": f"{peak_mib():,.0f}",
    }


def catalogue_row(chunks: int) -> str:
    """What a catalogue of made-up chunks takes, eight in a pack, and what a document of ten other chunks changes."""
    ids = [digest_of(number.to_bytes(8, "little")) + "00000000" for number in range(chunks + CHUNKS)]
    in_order = sorted(enumerate(ids[:chunks]), key=lambda pair: pair[1])  # as a store tells its chunks
    made = {key: described(number, key) for number, key in in_order}
    files = {
        key: File(digest_of(key.encode()), number, made[key].place) for number, key in enumerate(ids[:chunks:CHUNKS])
    }
    before, taken_s = timed(lambda: sharded(Catalogue({}, files=files, chunks=made), None))
    seconds = time.process_time()
    gone = {*ids[:CHUNKS]}
    kept = {key: chunk for key, chunk in made.items() if key not in gone}
    new = {key: described(number, key) for number, key in enumerate(ids[chunks:], chunks)}
    _, changed = sharded(Catalogue({}, files=files, chunks=kept | new), before[0])
    row = (
        f"{chunks:,}",
        f"{len(before[0].shards):,}",
        f"{sum(map(len, before[1].values())) / 1e6:.2f}",
        f"{len(pack_root(before[0])) / 1e6:.3f}",
        str(len(changed)),
        f"{sum(map(len, changed.values())) / 1e6:.2f}",
        f"{taken_s:.1f}",
        f"{time.process_time() - seconds:.1f}",
        f"{peak_mib():,.0f}",
    )
    return f"| {' | '.join(row)} |"


def peak_mib() -> float:
    """Of this process; what `getrusage` says has the memory of who started it in it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def timed(job: Callable[[], T]) -> tuple[T, float]:
    """What a job gives, and seconds of the processor."""
    started = time.process_time()
    return job(), time.process_time() - started


def described(number: int, key: str) -> Chunk:
    """A chunk of 30 layers at one level, of about a megabyte, with its description."""
    pack = Pack(digest_of(f"pack {number // 8}".encode()), 2**23)
    text = Pack(digest_of(f"text {number // 4000}".encode()), 2**23)
    marks = [digest_of(f"{key} {of}".encode()) for of in ("raw", "text")]
    level = Level(2**20 // 30 * 30, marks[0], place=Place(pack, number % 8 * 2**20, (2**20 // 30,) * 30))
    return Chunk(marks[1], 30, {"raw": level}, Place(text, number % 4000 * 2000, (2000,)))


class Requests:
    """What an object store would be asked: by kind, and bytes; `of_store`: pages of the local store that are read."""

    def __init__(self) -> None:
        self.of = Counter[str]()
        self.sent = self.read = self.of_store = 0

    def watch(self) -> None:
        """Count what is asked of any folder from now on, and pages of stores that are looked into."""
        get, put, sizes, swap = FolderBlobs.get, FolderBlobs.put, FolderBlobs.sizes, FolderBlobs.swap
        delete, reader = FolderBlobs.delete, FolderBlobs.reader

        parse = tree.parse_page

        def counted_parse(*given: Any) -> Any:
            self.of_store += 1
            return parse(*given)

        tree.parse_page = counted_parse

        def counted_get(blobs: FolderBlobs, names: Sequence[str]) -> list[bytes | None]:
            values = get(blobs, names)
            self.of["get"] += len(names)
            self.read += sum(len(value or b"") for value in values)
            return values

        def counted_put(blobs: FolderBlobs, values: Mapping[str, bytes]) -> None:
            self.of["put"] += len(values)
            self.sent += sum(map(len, values.values()))
            put(blobs, values)

        def counted_sizes(blobs: FolderBlobs, names: Sequence[str]) -> list[int]:
            self.of["list"] += len(names) if len(names) <= 100 else -(-len(names) // _LIST)
            return sizes(blobs, names)

        def counted_swap(blobs: FolderBlobs, name: str, before: bytes | None, after: bytes) -> bool:
            self.of["put"] += 1
            return swap(blobs, name, before, after)

        def counted_delete(blobs: FolderBlobs, names: Sequence[str]) -> None:
            self.of["delete"] += -(-len(names) // _LIST)
            delete(blobs, names)

        def counted_reader(blobs: FolderBlobs) -> object:
            found = reader(blobs)
            ask, take = found.ask, found.take

            def counted_ask(wanted: Sequence) -> None:
                self.of["get"] += len({id(span) for span in spans_of(wanted)})
                ask(wanted)

            def counted_take() -> bytes | None:
                value = take()
                self.read += len(value or b"")
                return value

            found.ask, found.take = counted_ask, counted_take
            return found

        for name, method in (("get", counted_get), ("put", counted_put), ("sizes", counted_sizes)):
            setattr(FolderBlobs, name, method)
        for name, method in (("swap", counted_swap), ("delete", counted_delete), ("reader", counted_reader)):
            setattr(FolderBlobs, name, method)


def change(store: Store) -> None:
    """A file with other chunks than it had; what it had is forgotten."""
    entry = next(store.files())
    refs = []
    with store.writer() as writer:
        for number, at in enumerate(store.chunk_ids()[:: max(1, len(store.chunk_ids()) // CHUNKS)][:CHUNKS]):
            info, record = store.chunk_info(at), store.read_kv(at, "raw", 0)
            assert info is not None
            assert record is not None
            ids = (number, *info.token_ids[1:])
            identity = store.manifest()["identity"]
            new = chunk_id(
                namespace=identity.get("namespace", ""),
                model_fingerprint=identity["fingerprint"],
                lead_in=info.lead_in,
                token_ids=ids,
            )
            described = ChunkInfo(ids, info.lead_in, info.layers, info.sensitivity, info.arithmetic)
            writer.put_chunk(new, described, "raw", [encode_record(new, record[0], [bytes(record[1])])])
            refs.append(ChunkRef(new, 0, 1, len(ids)))
        changed = FileEntry(entry.path, 1, entry.mtime_ns + 1, "changed", entry.settings, (entry.path,))
        writer.commit_file(changed, [DocumentEntry(entry.path, "text", "changed", tuple(refs))])
        writer.collect()


if __name__ == "__main__":
    main()
