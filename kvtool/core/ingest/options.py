from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.options import LockOptions, max_size_option
from kvtool.core.codec.levels import WHOLE
from kvtool.core.corpus.options import command_error, commands_of, encoding_error, shard_error
from kvtool.core.corpus.split import METHODS, SplitSettings
from kvtool.core.errors import UsageError
from kvtool.core.model.options import DEFAULT_SYSTEM, ModelOptions, embedder_option, system_option
from kvtool.core.options.option import Options, option

if TYPE_CHECKING:
    from kvtool.core.corpus.reading import Reading

FILES, SPLITTING, STORING, WORKERS = "Files", "Chunks", "Storage", "Workers"  # headings in the command's help
LEAD_INS = ("warm", "prefix", "neighbour", "bos", "none")
_LEAD_INS_SHOWN = "|".join((*LEAD_INS, "sink:N", "FILE"))


def is_lead_in_file(value: str) -> bool:
    return value not in LEAD_INS and not re.fullmatch(r"sink:[1-9]\d*", value)


def _check_lead_in(value: str) -> str:
    if not is_lead_in_file(value):
        return ""
    if not value.startswith("sink:") and (set(value) & set("./\\") or os.path.exists(value)):
        return ""
    return f"is no lead-in: {_LEAD_INS_SHOWN}"


@dataclass(frozen=True, kw_only=True)
class _SplitOptions(Options, sections=("ingest",), group=SPLITTING):
    split: str | None = option(
        None,
        "Where to cut chunks; semantic follows sections.",
        choices=METHODS,
        instead="the store's own, else semantic",
    )
    chunk_tokens: int | None = option(
        None, "Target length of a chunk (passage), in tokens.", lowest=1, instead="the store's own, else 256"
    )
    min_chunk_tokens: int | None = option(
        None,
        "Minimum length of a chunk, in tokens; 0 suits the split.",
        synonyms=("--min-tokens",),
        lowest=0,
        instead="the store's own, else 0",
    )
    max_chunk_tokens: int | None = option(
        None, "Maximum length of a chunk, in tokens.", synonyms=("--max-tokens",), lowest=1, instead="the target length"
    )


@dataclass(frozen=True, kw_only=True)
class _StorageOptions(Options, sections=("ingest",), group=STORING):
    level: str = option(
        "raw",
        "Compression level: raw and lossless are exact, 1 loses least.",
        setting="ingest_level",
        choices=WHOLE,
        metavar="raw|lossless|1..4",
    )
    store_dtype: str | None = option(
        None,
        "Number format of the stored KV.",
        choices=("bfloat16", "float16", "float32"),
        instead="the store's own, else 16 bits",
    )
    lead_in: str | None = option(
        None,
        "Tokens that the model reads before each chunk; see `kvtool help concepts`.",
        metavar=_LEAD_INS_SHOWN,
        suggest=LEAD_INS,
        check=_check_lead_in,
        instead="the store's own, else warm",
    )
    system: str | None = system_option(STORING, instead=f"the store's own, else: {DEFAULT_SYSTEM}")
    embedder: str | None = embedder_option(STORING)
    max_size: int | None = max_size_option()


@dataclass(frozen=True, kw_only=True)
class _ComputeOptions(Options, sections=("ingest",), group=STORING):
    lazy: bool = option(False, "Store only texts; KV is computed later.")
    compute_for: float | None = option(
        None,
        "Stop computing KV after this time; the next run continues.",
        flag="--for",
        unit="duration",
        lowest=0,
        instead="until all KV is there",
    )


@dataclass(frozen=True, kw_only=True)
class _WorkerOptions(Options, sections=("ingest",)):
    ray: str | None = option(
        None,
        "Compute on Ray workers.",
        group=WORKERS,
        setting=False,
        metavar="local|auto|ADDRESS",
        instead="in this process",
    )
    ray_workers: int = option(
        0,
        "Number of Ray workers.",
        group=WORKERS,
        setting=False,
        lowest=0,
        instead="one per GPU for a model, else one per 8 cores",
    )


@dataclass(frozen=True, kw_only=True)
class IngestOptions(
    ModelOptions,
    LockOptions,
    _WorkerOptions,
    _ComputeOptions,
    _StorageOptions,
    _SplitOptions,
    sections=("ingest",),
    group=FILES,
    settings=False,
):
    """Options of what to ingest, and how; None means: as the store has it, else the default."""

    paths: tuple[Path, ...] = option((), "Files and folders.", flag=None)
    roots: tuple[Path, ...] = option((), "Read only what these folders show to others than the user.", flag=None)
    include: tuple[str, ...] = option((), "Read only these files.", metavar="GLOB")
    exclude: tuple[str, ...] = option((), "Skip these files.", metavar="GLOB")
    ignore: bool = option(
        True, "Skip lock files, and files named in .gitignore or .kvtoolignore.", flag="--ignore/--no-ignore"
    )
    sync: bool = option(False, "Remove documents below PATH whose files are gone.")
    shard: str | None = option(
        None,
        "Read only part I of N of the files; `kvtool store import` joins the stores.",
        metavar="I/N",
        check=shard_error,
        instead="all files",
    )
    readers: tuple[str, ...] = option(
        (),
        "Read files with this ending by a command that prints their text; `{}` is the file.",
        flag="--reader",
        metavar="ENDING=COMMAND",
        check=command_error,
        table=True,
        user_only=True,
        setting=True,
    )
    encoding: str | None = option(
        None,
        "Encoding of texts that are not UTF-8 and do not name theirs.",
        metavar="NAME",
        check=encoding_error,
        instead="guessed from each file",
        setting=True,
    )
    read_timeout: float = option(60.0, "Maximum time to read one file.", unit="duration", lowest=1, setting=True)
    read_memory: int = option(
        2 * 10**9, "Maximum memory to read one file.", unit="size", lowest=10**8, instead="2GB", setting=True
    )
    dry_run: bool = option(False, "Show what would be done, and do nothing.")
    continue_on_error: bool = option(
        True, "After a file that fails, continue (exit code 3) or stop.", flag="--continue-on-error/--fail-fast"
    )
    log: Path | None = option(None, "Append one JSON event per line to this file.", metavar="FILE.jsonl", unit="path")

    def check(self) -> None:
        super().check()
        if self.ray_workers and self.ray is None:
            raise UsageError("--ray-workers says how many workers of Ray, and none are asked for", "add --ray local")
        commands_of(self.readers)
        lengths = [n for n in (self.min_chunk_tokens, self.chunk_tokens, self._longest) if n is not None]
        if lengths != sorted(lengths):
            raise UsageError(
                f"chunk lengths contradict each other: {' > '.join(map(str, lengths))} tokens",
                "min_chunk_tokens <= chunk_tokens <= max_chunk_tokens",
            )

    @property
    def reading(self) -> Reading:
        from kvtool.core.corpus.reading import Bounds, Reading  # every command declares these options, and few read

        return Reading(commands_of(self.readers), Bounds(self.read_timeout, self.read_memory), self.encoding or "")

    @property
    def _longest(self) -> int:
        return self.max_chunk_tokens or self.chunk_tokens or SplitSettings().max_tokens

    @property
    def splitting(self) -> SplitSettings | None:
        """Return the settings for splitting documents, if any was given; None: as the store has it."""
        asked = (self.split, self.chunk_tokens, self.min_chunk_tokens, self.max_chunk_tokens)
        if all(each is None for each in asked):
            return None
        method = self.split or SplitSettings().method
        return SplitSettings(method, self._longest, self.min_chunk_tokens or 0)


@dataclass(frozen=True, kw_only=True)
class WatchOptions(IngestOptions):
    ray: str | None = option(None, "Without one: the model stays loaded here.", flag=None, setting=False)
    ray_workers: int = option(0, "Without one.", flag=None, setting=False)
    debounce: float = option(
        0.5,
        "Time without changes after which a file is read.",
        group=FILES,
        setting=False,
        unit="duration",
        lowest=0.05,
        highest=3600,
    )
