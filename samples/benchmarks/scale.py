"""What a store of very many chunks costs, operation by operation: seconds, memory, reads, and how each grows.

    python samples/benchmarks/scale.py make FOLDER [--chunks 10000 100000 1000000]
    python samples/benchmarks/scale.py measure FOLDER [--chunks 10000 100000 1000000] [--only NAME ...]

`make` writes a tiny random model, and for each size a folder of text files (ten chunks each) and the store that an
ingest would make of them; at a million chunks this takes some minutes and 5 GB. Existing ones stay as they are. The
records are small, and made up: everything but the prefill is as in a store of a real model.

`measure` runs commands on a copy of each store, each in a process of its own, and prints a table: seconds of the clock
and of the processor, the most memory (that which is no mapped file's), reads by calls, and the exponent with which the
processor's seconds grow from the size before: 1 is linear. A command's fixed second of start-up hides small exponents.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

from many_files import write_model
from scaling.making import CHUNKS, fill, path_of, restore, write_files
from scaling.operations import OPERATIONS, Operation, Place
from scaling.watching import Taken, watched

SIZES = (10_000, 100_000, 1_000_000)
_SPLIT = ("--split", "paragraph", "--chunk-tokens", "48")


def make(folder: Path, chunks: int) -> None:
    place, started = folder / str(chunks), time.perf_counter()
    if (place / "made").exists():
        return
    shutil.rmtree(place / "store", ignore_errors=True)
    files, count = place / "files", chunks // CHUNKS
    write_files(files, count)
    time.sleep(2.5)  # what has just been written counts as still changing
    first = ["ingest", str(path_of(files, 0)), "--model", str(folder / "model"), *_SPLIT]
    kvtool(folder, place / "store", first)
    fill(place / "store", files, count)
    print(f"{chunks:,}: made in {time.perf_counter() - started:.0f} s", flush=True)
    taken = kvtool(folder, place / "store", ["ingest", str(files), "--json"])
    report = json.loads((folder / "said").read_text())
    assert report["documents"] == {"added": 0, "changed": 0, "unchanged": count, "removed": 0, "failed": 0}, report
    print(f"{chunks:,}: all files read, {count:,} unchanged, index built: {taken.seconds:.0f} s, {taken.own:.0f} MiB")
    (place / "made").touch()


def kvtool(folder: Path, store: Path, words: list[str], until: str | None = None) -> Taken:
    command = [sys.executable, "-P", "-m", "kvtool", *words, "--store", str(store)]
    environment = os.environ | {"KVTOOL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return watched(command, environment, folder / "said", until)


def measure(folder: Path, sizes: list[int], only: list[str]) -> None:
    shown = [each for each in OPERATIONS if not only or any(name in each.name for name in only)]
    print("| operation | chunks | seconds | CPU s | own MiB | peak MiB | reads | MB read | exponent |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    before: dict[str, tuple[int, Taken]] = {}
    for chunks in sizes:
        place = copied(folder, chunks)
        for each in shown:
            taken = once(folder, place, each)
            print(line(each.name, chunks, taken, before.get(each.name)), flush=True)
            before[each.name] = chunks, taken


def copied(folder: Path, chunks: int) -> Place:
    """A copy of a store, which may be changed; the files are those of the store itself."""
    made, work = folder / str(chunks), folder / str(chunks) / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made / "store", work)
    restore(made / "files", 1)
    size = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    return Place(work, made / "files", chunks // CHUNKS, size)


def once(folder: Path, place: Place, operation: Operation) -> Taken:
    operation.before(place)
    return kvtool(folder, place.store, operation.words(place), operation.until)


def line(name: str, chunks: int, taken: Taken, before: tuple[int, Taken] | None) -> str:
    exponent = ""
    if before is not None:
        exponent = f"{math.log(taken.cpu / before[1].cpu) / math.log(chunks / before[0]):.2f}"
    return (
        f"| {name} | {chunks:,} | {taken.seconds:.1f} | {taken.cpu:.1f} | {taken.own:.0f} | {taken.peak:.0f} "
        f"| {taken.reads:,} | {taken.read:,.1f} | {exponent} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunks", type=int, nargs="+", default=list(SIZES), help="how many, of each store")
    parser.add_argument("--only", nargs="+", default=[], help="operations whose names hold one of these words")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.what == "measure":
        measure(folder, given.chunks, given.only)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        maker = multiprocessing.get_context("spawn").Process(target=write_model, args=(folder / "model", 16, 1))
        maker.start()
        maker.join()
    for chunks in given.chunks:
        make(folder, chunks)


if __name__ == "__main__":
    main()
