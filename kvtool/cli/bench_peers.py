"""`kvtool bench peers`: beside llama.cpp and plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.core.checkpoint.files import PACKAGED
from kvtool.core.common.machine import cores, is_busy
from kvtool.core.common.progress import Events
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.lab.bench.options import PeersBenchOptions

if TYPE_CHECKING:
    from kvtool.lab.bench.peers.rows import PeersBench


@takes(
    PeersBenchOptions,
    QueryOptions.some("ratio", "link_tokens", "link"),
    IngestOptions.some("chunk_tokens"),
    ModelOptions.some("model", "dtype", "offline"),
    examples=("bench peers", "bench peers --context 1000,4000,8000 --repeat 1 --resume peers.jsonl"),
)
def peers(run: Run) -> None:
    """What a user would pick instead: llama.cpp and plain transformers.

    The same GGUF file, prompts, cores and moment for all; every contender in a process of its own, in turn. The model
    is smollm2 unless --model names another GGUF file. llama.cpp comes with `pip install 'kvtool[peers]'`.
    """
    from kvtool.lab.bench.peers.job import PeersOptions, measure_peers, runs
    from kvtool.lab.bench.peers.rows import gathered

    wanted, model = run.get(PeersBenchOptions), run.get(ModelOptions)
    there = cores()
    if wanted.threads is not None and wanted.threads > there:
        raise UsageError(f"--threads {wanted.threads}: there are {there} cores", f"take at most {there}")
    options = PeersOptions(
        model=model.model or PACKAGED,
        dtype=model.dtype,
        offline=model.offline,
        peers=wanted.peers,
        modes=wanted.fusion,
        contexts=tuple(dict.fromkeys(wanted.context)),
        question_tokens=wanted.question_tokens,
        chunk_tokens=run.get(IngestOptions).chunk_tokens or SplitSettings().max_tokens,
        new_tokens=wanted.new_tokens,
        threads=wanted.threads or there,
        level=wanted.level,
        repeat=wanted.repeat,
        query=run.get(QueryOptions),
    )
    if is_busy():
        run.out.warning(
            "other programs want the cores: times will not be this machine's own", "measure when it is idle"
        )
    with run.out.progress("measure", total=runs(options), unit="runs") as bar:
        events = Events(status=bar.describe, advance=bar.advance)
        result = gathered(measure_peers(options, wanted.resume, events), options, there)
    if wanted.plot is not None:
        _draw(result, wanted.plot)
    run.out.result(result.to_json(), human=lambda: _show(run, result))


def _draw(result: PeersBench, path: Path) -> None:
    from kvtool.lab.charts.peers import peers_chart

    try:
        path.write_text(peers_chart(result), encoding="utf-8")
    except OSError as error:
        raise KvtoolError(f"the figure cannot be written: {error}", "name a file in a folder that is there") from error


def _show(run: Run, result: PeersBench) -> None:
    from kvtool.lab.charts.peers import STORED_HEAD, TABLE_HEAD, peers_notes, peers_table, stored_table

    run.out.table(TABLE_HEAD, peers_table(result))
    run.out.table(STORED_HEAD, stored_table(result))
    for line in peers_notes(result):
        run.out.print(line)
