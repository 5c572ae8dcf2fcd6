"""A slow disk: what each mode and level takes from one, and what `--fusion auto` makes of it.

    python samples/tools/slow_disk.py plan
    python samples/tools/slow_disk.py run STORE --mb 2 --question TEXT [--runs union:raw,union:2,auto]   (root, Linux)

`plan` expects, from the figures of one H100 (samples/results/gpu.md), what a prompt of 16,384 tokens takes an 8B model
from a disk of 1.3 GB/s. `run` asks a question in processes that may read so many megabytes a second from the device of
STORE, by a control group, each with nothing of the store in memory. Only the store should be on that device:

    truncate -s 2G disk.img; mkfs.ext4 -q disk.img; mount -o loop disk.img /mnt/slow; cp -r STORE /mnt/slow/store
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtool.core.fusion.cost import LoadSpeed, PassSpeed, PromptRows, Span, Speeds
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.query.auto import Decision, decide

# Llama-3.1-8B on the H100: fitted to full prefill of 4,096 and 16,384 tokens (116 and 551 ms), and the host's 12 ms.
PASS = PassSpeed(fixed=0.012, row=2.29e-5, key=1.22e-9)
LAYERS, TOKEN = 32, 2 * 32 * 8 * 128  # numbers of keys and values a token
DISK, DECODE = 1.3e9, 14e9  # bytes a second: read, and decoded (as 16-bit numbers)
BITS = {"raw": 16.0, "1": 3.62, "2": 2.19, "3": 1.11}  # samples/results/codec.md
CHUNKS, CHUNK, QUESTION = 32, 512, 32


def h100_speeds() -> Speeds:
    """Return the H100's speeds; reading and decoding of a layer overlap with each other, so the slower counts."""
    read = {level: TOKEN * bits / 8 / DISK for level, bits in BITS.items()}
    loads = {level: max(took, 0.0 if level == "raw" else TOKEN * 2 / DECODE) for level, took in read.items()}
    return Speeds(
        PASS, {name: LoadSpeed(0.0, took, 1.0, TOKEN * 2 / took) for name, took in loads.items()}, LAYERS, 16, 16, True
    )


def prompt(level: str) -> list[Span]:
    """Return a prompt of 16,416 tokens whose beginning is held in memory."""
    chunks = [Span(CHUNK, "hit", level)] * (CHUNKS - 1)
    return [Span(CHUNK, "exact", "raw", held=True), *chunks, Span(QUESTION, "fresh")]


def expected(mode: str, level: str) -> float:
    """Return the seconds that a mode is expected to take of chunks at a level."""
    return SELECTORS[mode]().expected_seconds(PromptRows(prompt(level), h100_speeds()))


def decision() -> Decision:
    """Decide as `--fusion auto` does."""
    lossless = [kind() for kind in SELECTORS.values() if kind.lossless]
    floor = SELECTORS["union"]().with_amount(0.15)
    return decide({level: prompt(level) for level in BITS}, h100_speeds(), floor, lossless)


def plan() -> None:
    full = expected("full", "raw")
    modes = ("reuse", "epic", "blend", "union")
    print(f"of full prefill ({full * 1e3:.0f} ms) | {' | '.join(modes)}")
    for level in BITS:
        print(f"{level} | " + " | ".join(f"{expected(mode, level) / full:.2f}" for mode in modes))
    print(*decision().reasons, sep="\n")


@contextmanager
def throttled(folder: Path, bytes_per_second: int) -> Iterator[Path]:
    """Make a control group whose processes read so much from a folder's device; yield the file that takes them in."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    old = Path("/sys/fs/cgroup/blkio")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / "kvtool-slow-disk"
    group.mkdir(exist_ok=True)
    limit = ("blkio.throttle.read_bps_device", "{}") if old.is_dir() else ("io.max", "rbps={}")
    (group / limit[0]).write_text(f"{name} {limit[1].format(bytes_per_second)}\n")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def drop(folder: Path) -> None:
    """Take a folder's files out of memory."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ask(store: Path, question: str, run: str, procs: Path) -> None:
    mode, _, level = run.partition(":")
    command = [sys.executable, "-m", "kvtool", "query", question, "--store", str(store), "--max-tokens", "1", "--json"]
    command += ["--fusion", mode, *(["--level", level] if level else ["--set", "load.max_loss=1"])]
    drop(store)
    enter = lambda: procs.write_text(str(os.getpid()))  # noqa: E731
    environ = os.environ | {"KVTOOL_SERVER": "no"}
    done = subprocess.run(command, preexec_fn=enter, env=environ, stdout=subprocess.PIPE, check=True)
    reply = json.loads(done.stdout)
    took, read = reply["timing_ms"]["ttft"], reply["bytes_read"]
    print(run, f"{took:.0f} ms", reply["tokens"], f"{read / 1e6:.2f} MB", sep=" | ")
    for note in (reply.get("controller") or {}).get("notes", ()):
        print("   ", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan")
    running = commands.add_parser("run")
    running.add_argument("store", type=Path)
    running.add_argument("--mb", type=float, required=True, help="a second")
    running.add_argument("--question", required=True)
    running.add_argument("--runs", default="full,union:raw,union:2,auto,auto")
    asked = parser.parse_args()
    if asked.command == "plan":
        plan()
        return
    with throttled(asked.store, round(asked.mb * 1e6)) as procs:
        for run in asked.runs.split(","):
            ask(asked.store, asked.question, run, procs)


if __name__ == "__main__":
    main()
