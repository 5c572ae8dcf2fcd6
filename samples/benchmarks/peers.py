"""kvtool against llama.cpp and plain transformers: time to the first token, decoding, loading, memory, stored bytes.

    python samples/benchmarks/peers.py
    python samples/benchmarks/peers.py --context 1000,4000,8000 --repeat 1 --resume peers.jsonl

The same GGUF file, prompts, cores and moment for all; every system in a process of its own, in turn. The model is
smollm2 unless --model names another GGUF file. llama.cpp comes with `pip install 'kvtool[peers]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.cli.out import Out
from kvtool.core.checkpoint.files import PACKAGED
from kvtool.core.codec.levels import LEVELS
from kvtool.core.common.machine import cores, is_busy
from kvtool.core.common.types import Events
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import UsageError
from kvtool.core.fusion.selectors import MODES
from kvtool.core.query.options import QueryOptions
from samples.benchmarks.script import Parser, parser, run, several, whole
from samples.benchmarks.systems.job import PeersOptions, measure_peers, runs
from samples.benchmarks.systems.rows import PeerRow, PeersBench, gathered
from samples.benchmarks.systems.task import KVTOOL, LLAMA, PEERS

TABLE_HEAD = (
    "who",
    "context",
    "TTFT s",
    "prefill tok/s",
    "decode tok/s",
    "speedup",
    "efficiency",
    "ready s",
    "libraries MB",
    "model MB",
    "peak MB",
    "mapped",
    "rounds",
)
STORED_HEAD = ("stored", "KB a token")
_SAVED = "{}: from its saved state"
_MEANING = (
    "speedup: the quickest llama.cpp without a saved state / this one; efficiency: (the quicker full prefill of "
    "transformers and kvtool / this mode) / (full FLOPs / this mode's); ready: libraries imported and the model "
    "loaded, files in the page cache"
)


def arguments() -> Parser:
    made, query = parser(__doc__), QueryOptions()
    made.add_argument("--peers", type=several(str, PEERS), default=PEERS, metavar="a,b", help=",".join(PEERS))
    modes = ("full", "union", "epic", "reuse")
    made.add_argument("--fusion", type=several(str, MODES), default=modes, metavar="a,b", help="modes of kvtool")
    made.add_argument("--context", type=several(whole), default=(1000,), metavar="N,N", help="tokens of the prompt")
    made.add_argument("--question-tokens", type=whole, default=32, metavar="N")
    made.add_argument("--new-tokens", type=whole, default=64, metavar="N", help="decoded after the first")
    made.add_argument("--chunk-tokens", type=whole, default=SplitSettings().max_tokens, metavar="N")
    made.add_argument("--level", choices=[*LEVELS], default="raw", metavar="LEVEL", help="codec level that is read")
    made.add_argument("--ratio", type=float, default=query.ratio, metavar="SHARE", help="as of a query")
    made.add_argument("--link-tokens", type=int, default=query.link_tokens, metavar="N", help="as of a query")
    made.add_argument("--link", default=query.link, help="as of a query")
    made.add_argument("--repeat", type=whole, default=3, metavar="N", help="rounds; medians are shown")
    made.add_argument("--threads", type=whole, default=cores(), metavar="N", help="of all arithmetic")
    made.add_argument("--model", default=PACKAGED, help="a GGUF file or a folder (default smollm2)")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--offline", action="store_true")
    made.add_argument("--resume", type=Path, metavar="FILE.jsonl", help="keep results here and go on from them")
    return made


def measure(given: argparse.Namespace, out: Out) -> None:
    """Measure what is missing, and show the result."""
    if given.threads > (there := cores()):
        raise UsageError(f"--threads {given.threads}: there are {there} cores", f"take at most {there}")
    options = PeersOptions(
        model=given.model,
        dtype=given.dtype,
        offline=given.offline,
        peers=given.peers,
        modes=given.fusion,
        contexts=given.context,
        question_tokens=given.question_tokens,
        chunk_tokens=given.chunk_tokens,
        new_tokens=given.new_tokens,
        threads=given.threads,
        level=given.level,
        repeat=given.repeat,
        query=QueryOptions(ratio=given.ratio, link_tokens=given.link_tokens, link=given.link),
    )
    if is_busy():
        out.warning("other programs want the cores: times will not be this machine's own", "measure when it is idle")
    with out.progress("measure", total=runs(options), unit="runs") as bar:
        events = Events(advance=bar.advance)
        result = gathered(measure_peers(options, given.resume, events), options, there)
    out.result(result.to_json(), human=lambda: show(out, result))


def show(out: Out, result: PeersBench) -> None:
    out.table(TABLE_HEAD, peers_table(result))
    out.table(STORED_HEAD, stored_table(result))
    for line in peers_notes(result):
        out.print(line)


def main(given: Sequence[str] | None = None) -> int:
    return run(arguments(), given, measure)


def peers_table(result: PeersBench) -> Iterator[tuple[Any, ...]]:
    """Yield rows under `TABLE_HEAD`; the row of a saved state follows its contender's."""
    for row in result.rows:
        yield _cells(row)
        if row.saved:
            faster = "" if row.speedup is None else f"{row.speedup * row.ttft_ms / row.saved['ttft_ms']:.2f}"
            label = _SAVED.format(row.contender)
            yield (label, row.context, f"{row.saved['ttft_ms'] / 1e3:.3f}", "", "", faster, *[""] * 7)


def _cells(row: PeerRow) -> tuple[Any, ...]:
    return (
        row.contender,
        row.context,
        f"{row.ttft_ms / 1e3:.3f}",
        f"{row.prefill_tokens_per_second:.0f}",
        f"{row.decode_tokens_per_second:.1f}",
        "" if row.speedup is None else f"{row.speedup:.2f}",
        "" if row.efficiency is None else f"{row.efficiency:.2f}",
        f"{(row.import_ms + row.model_load_ms) / 1e3:.2f}",
        *(_megabytes(size) for size in (row.base_bytes, row.loaded_bytes, row.peak_bytes, row.mapped_bytes)),
        row.count,
    )


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.0f}"


def stored_table(result: PeersBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `STORED_HEAD`: every level, and llama.cpp's file."""
    for row in result.stored:
        yield f"{KVTOOL} {row['level']}", f"{row['bytes_per_token'] / 1e3:.2f}"
    saved = [row.saved for row in result.rows if row.saved]
    if saved:
        yield f"{LLAMA}, saved state", f"{max(saved, key=lambda one: one['tokens'])['bytes_per_token'] / 1e3:.2f}"


def peers_notes(result: PeersBench) -> Iterator[str]:
    """Yield what was measured, on what, and what the numbers mean."""
    yield (
        f"{result.model} in {result.dtype}, {result.threads} threads on {result.cores} cores; level {result.level}, "
        f"chunks of {result.chunk_tokens}, a question of {result.question_tokens}, {result.new_tokens} tokens decoded; "
        f"ratio {result.ratio:g}, {result.link_tokens} link tokens; medians of the rounds"
    )
    from samples.benchmarks.bench.machine import Host  # imports torch, which only the measuring processes need

    yield Host(**result.host).line()
    for kind, version, build in dict.fromkeys((who.kind, who.version, who.build) for who in result.contenders):
        yield f"{kind} {version}: {build}"
    yield _MEANING
    yield from result.includes.split(". ")


if __name__ == "__main__":
    sys.exit(main())
