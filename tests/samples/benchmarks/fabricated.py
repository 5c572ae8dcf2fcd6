"""Invented measurements, with which rows, tables, charts and pages can be tested without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import resolve_dtype
from kvtool.core.query.options import QueryOptions
from kvtool.reports.evaluation import Journal
from samples.benchmarks.systems.job import KIND, ONCE, PeersOptions, facts_of, key_of, llama_contenders
from samples.benchmarks.systems.task import KVTOOL, LLAMA, PEERS, TRANSFORMERS, Contender, Measured, Saved

TRIED = [
    {"ubatch": 128, "flash": "on", "prefill_ms": 90.0},
    {"ubatch": 128, "flash": "off", "prefill_ms": 95.0},
    {"ubatch": 512, "flash": "on", "prefill_ms": 100.0},
    {"ubatch": 512, "flash": "off", "prefill_ms": 85.0},
]
STORED = [{"level": "raw", "bytes_per_token": 23050.5}, {"level": "2", "bytes_per_token": 1720.0}]
HOST = {
    "cpu": "A CPU",
    "cpu_features": ["avx2"],
    "torch": "2.13",
    "torch_kernels": "AVX2",
    "fast_bfloat16": False,
    "threads": 1,
    "cores": 2,
    "held_to": {},
    "accelerator": "",
}
MODES = ("full", "union", "epic", "reuse")
_TTFT = {"full": 400.0, "union": 200.0, "epic": 100.0, "reuse": 50.0}  # milliseconds of 1,000 tokens


def options(model: str = "tiny", contexts: Sequence[int] = (1000,), repeat: int = 2, **more: Any) -> PeersOptions:
    """Options of a run; everything else is as small as can be."""
    given: dict[str, Any] = {
        "model": model,
        "dtype": "auto",
        "offline": False,
        "peers": PEERS,
        "modes": MODES,
        "contexts": tuple(contexts),
        "question_tokens": 32,
        "chunk_tokens": 256,
        "new_tokens": 4,
        "threads": 1,
        "level": "raw",
        "repeat": repeat,
        "query": QueryOptions(),
    }
    return PeersOptions(**{**given, **more})


def contenders() -> list[Contender]:
    """Everybody."""
    ours = (Contender(KVTOOL, mode=mode) for mode in MODES)
    return [*llama_contenders(TRIED), Contender(TRANSFORMERS), *ours]


def measured(contender: Contender, context: int = 1000, late: float = 0.0) -> Measured:
    """What one process might have found; a round that was `late` took so many milliseconds more."""
    llama = contender.kind == LLAMA
    base = 1000.0 + contender.ubatch if llama else _TTFT.get(contender.mode, 500.0)
    return Measured(
        import_ms=100.0,
        model_load_ms=200.0,
        warm_ms=30.0,
        ttft_ms=base * context / 1000 + late,
        ttft_cpu_ms=base,
        decode_ms=40.0 if contender.flash != "off" else 20.0,
        base_bytes=40_000_000,
        loaded_bytes=170_000_000,
        peak_bytes=180_000_000,
        mapped_bytes=120_000_000,
        ids=(7, 8, 9, 5, 4) if llama else (7, 8, 9, 6, 4),
        version="1.0",
        build="AVX2 = 1",
        saved=Saved(23_000 * context, context - 32, 12.0, 80.0 + late) if llama else None,
        bytes_read=1000 if contender.kind == KVTOOL else None,
        flops={"full": 1000, "union": 250, "epic": 125, "reuse": 50}.get(contender.mode),
    )


def write_journal(path: Path, wanted: PeersOptions) -> None:
    """A file that `--resume` has nothing to add to."""
    files = resolve(wanted.model)
    dtype = resolve_dtype(wanted.dtype, "cpu", files)
    journal = Journal(path, facts_of(wanted, files, dtype), KIND)
    with journal.writing():
        journal.add(ONCE, None, {"stored": {"host": HOST, "rows": STORED}, "tuning": {"context": 1000, "rows": TRIED}})
        for context in wanted.contexts:
            for number in range(wanted.repeat):
                rows = {key_of(each, number): asdict(measured(each, context, 9.0 * number)) for each in contenders()}
                journal.add(context, None, rows)
