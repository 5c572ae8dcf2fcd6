"""Result of an ingest, its log, its counts, and the estimate of the remaining work."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kvtool.core.cache.entries import ChunkSpec, FileEntry
from kvtool.core.cache.layout import disk_free
from kvtool.core.cache.store import Store
from kvtool.core.common.machine import cores, cpu_name
from kvtool.core.common.text import parsed, shown_size
from kvtool.core.common.types import Events
from kvtool.core.corpus.readers.document import EXTRA
from kvtool.core.corpus.walk import Failure, FoundFile, Skip, Skipped, places
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.session.due import DueChunk
from kvtool.core.session.identity import StoreIdentity

PHASES = {
    "model_download": "downloading the model, once",
    "model_hash": "hashing the model's files, once",
    "model_unpack": "reading the model's GGUF file, once",
    "model_files": "reading the model's settings and tokenizer",
    "model_load": "loading the model",
    "lead_in": "computing the lead-in of the chunks",
    "index": "indexing words",
    "gate": "trying the model on this store (the gate), once",
}
"""Phases in addition to reading and prefill, in words."""
_NOTED_BYTES = 10**7  # of KV, from which a forecast is shown
_MUCH_BYTES, _MUCH_SHARE = 2 * 10**9, 0.1  # of KV, or of the free disk, from which compression is suggested
_MINUTE = 60.0


@dataclass(slots=True)
class Documents:
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    failed: int = 0


@dataclass(slots=True)
class Chunks:
    computed: int = 0
    reused: int = 0
    removed: int = 0


@dataclass(slots=True)
class Left:
    """Chunks that still have no KV, and why: `lazy`, `time`, `size`, `changes` or `damage`."""

    chunks: int
    tokens: int
    reason: str


def left_of(chunks: Sequence[DueChunk], reason: str) -> Left:
    return Left(len(chunks), sum(chunk.tokens for chunk in chunks), reason)


@dataclass(frozen=True, slots=True)
class Forecast:
    tokens: int  # to be computed
    kv_bytes: int  # of their KV, before any compression
    seconds: float | None  # at the speed of the last ingest; None: unknown
    disk_free: int  # bytes that the disk has left
    level: str  # codec level that is stored

    @property
    def is_noted(self) -> bool:
        return self.kv_bytes >= _NOTED_BYTES

    def text(self) -> str:
        before = "" if self.level == "raw" else " before compression"
        kv, free = shown_size(self.kv_bytes), shown_size(self.disk_free)
        text = f"{self.tokens:,} tokens to compute: {kv} of KV{before}, {free} of disk free"
        if self.seconds is not None and self.seconds >= _MINUTE / 2:
            text += f"; about {self._minutes()} at the speed of the last ingest"
        return text

    def advice(self) -> str:
        much = self.kv_bytes >= min(_MUCH_BYTES, _MUCH_SHARE * self.disk_free)
        hint = (
            "`--level lossless` takes less and is exact; `kvtool compress --drop-raw` afterwards takes far less, "
            "with some loss"
        )
        return hint if much and self.level == "raw" else ""

    def _minutes(self) -> str:
        minutes = (self.seconds or 0) / _MINUTE
        return "a minute" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


@dataclass(slots=True)
class IngestReport:
    """Result of an ingest (`kvtool help json`); `tokens` and `kv_bytes` count what this run computed."""

    documents: Documents = field(default_factory=Documents)
    chunks: Chunks = field(default_factory=Chunks)
    tokens: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    phase: dict[str, float] = field(
        default_factory=lambda: {"texts": 0.0, "kv": 0.0}
    )  # seconds; texts can be asked after
    prefill_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds in addition to reading and prefill, by `PHASES`
    skipped: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Skip})  # by kind
    unsupported: dict[str, int] = field(default_factory=dict)  # by ending
    failures: list[dict[str, str]] = field(default_factory=list)
    known_failures: list[dict[str, str]] = field(default_factory=list)  # unchanged files; not among `failures`
    loss: float | None = None  # of the new chunks' level, in nats per token of the answer; None: not measured
    warnings: list[str] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] | None = None
    forecast: Forecast | None = None  # made before the first chunk; None: no chunk was to be computed
    left: Left | None = None  # None: every chunk has its KV
    ready: float | None = None  # share of the chunks that have KV, of those that can be computed; None: none can
    dry_run: bool = False

    @property
    def prefill_tokens_per_second(self) -> float | None:
        return self.tokens / self.prefill_seconds if self.prefill_seconds else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"prefill_tokens_per_second": self.prefill_tokens_per_second}


class EventLog:
    """Log of `--log`: one JSON event per line, with the process id, as runs may share the file. Raises UsageError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""  # after which nothing is written: a full disk under the log ends no ingest
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            os.set_blocking(self._file, True)  # opening waits for no reader of a FIFO
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"the log {path} cannot be written: {reason}", "--log takes a file in a folder that is there"
            ) from error

    def event(self, type: Literal["status", "warning", "error", "summary"], **facts: Any) -> None:
        if self.error:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": now, "pid": os.getpid(), "type": type} | facts) + "\n"
        try:
            os.write(self._file, line.encode("ascii"))
        except OSError as error:
            self.error = error.strerror or str(error)

    def listening(self, events: Events) -> Events:
        def warn(text: str, hint: str) -> None:
            self.event("warning", message=text, hint=hint)
            events.warn(text, hint)

        def failed(path: str, reason: str) -> None:
            self.event("error", message=reason, path=path)
            events.failed(path, reason)

        def status(text: str) -> None:
            self.event("status", message=text)
            events.status(text)

        def step(label: str, total: int, unit: str) -> None:
            self.event("status", message=label, total=total, unit=unit)
            events.step(label, total, unit)

        return replace(events, warn=warn, failed=failed, status=status, step=step)

    def close(self) -> None:
        os.close(self._file)


class Account:
    def __init__(self, options: IngestOptions, events: Events) -> None:
        self.report = IngestReport(dry_run=options.dry_run)
        self.events = events
        self._fail_fast = not options.continue_on_error
        self._unseen: set[str] = set()  # of the files to be read, by path
        self._computed = 0  # tokens
        self._began = self._computed_at = 0.0  # seconds of the first and the last of them
        self._options = options
        self._named = {str(place) for path in options.paths for place in places(path)}

    @contextmanager
    def phase(self, name: str, reported: bool = True) -> Iterator[None]:
        """Time a phase of the run, and report it unless the code inside does; a nested phase counts only for itself."""
        if reported:
            self.events.status(PHASES[name])
        phases = self.report.phases
        started, others = time.perf_counter(), sum(phases.values())
        try:
            yield
        finally:
            within = sum(phases.values()) - others
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - started - within

    def warn(self, text: str, hint: str = "") -> None:
        self.report.warnings.append(text)
        self.events.warn(text, hint)

    def skip(self, skipped: Skipped) -> None:
        self.report.skipped[skipped.kind.value] += 1
        if skipped.kind is Skip.UNSUPPORTED:
            self.report.unsupported[skipped.what] = self.report.unsupported.get(skipped.what, 0) + 1
        if skipped.kind is Skip.UNINSTALLED and self.report.skipped[skipped.kind.value] == 1:
            self.warn(f"{skipped.path} and its like are skipped: {skipped.reason.partition(' (')[0]}", EXTRA)
        elif skipped.path in self._named:
            self.warn(f"skipped {skipped.path}: {skipped.reason}")
        else:
            self.events.skipped(skipped.path, skipped.reason)

    def fail(self, failure: Failure) -> None:
        """Count a file that failed; one that failed the same way before is only noted. `--fail-fast` raises."""
        row = {"path": failure.path, "error": failure.error}
        if failure.known:
            self.report.known_failures.append(row)
            self.events.skipped(failure.path, f"{failure.error}, as before")
            return
        if self._fail_fast:
            raise KvtoolError(
                f"{failure.path}: {failure.error}", "without --fail-fast the other files are ingested all the same"
            )
        self.report.documents.failed += 1
        self.report.failures.append(row)
        self.events.failed(failure.path, failure.error)

    def begin(self, files: Sequence[FoundFile]) -> None:
        self._unseen = {file.name for file in files}
        if not self.report.dry_run:
            self.events.step("reading files", len(files), "files")

    def look_at(self, path: str) -> None:
        if path in self._unseen:
            self._unseen.remove(path)
            self.events.advance(1)

    def begin_computing(self, tokens: int) -> None:
        self._began = time.monotonic()
        self.events.step("computing KV", tokens, "tokens")

    def computed(self, chunks: Sequence[ChunkSpec]) -> None:
        tokens = sum(len(chunk.ids) for chunk in chunks)
        self._computed += tokens
        self._computed_at = time.monotonic()
        self.events.advance(tokens)

    def remember_speed(self, store: Store, fingerprint: str) -> None:
        seconds = self._computed_at - self._began
        if self._computed >= _MIN_TOKENS and seconds > 0:
            speed = {"tokens_per_second": self._computed / seconds}
            store.write_side(_SPEED, _marks(fingerprint, self._options) | speed)

    def resolve(self, identity: StoreIdentity, model: str, device: str, dtype: str) -> None:
        kept = {"store_dtype": identity.dtype, "fingerprint": identity.fingerprint, "lead_in": identity.lead_in.mode}
        self.report.resolved = {"model": model, "device": device, "dtype": dtype, **kept}

    def unchanged(self, entry: FileEntry) -> None:
        self.report.documents.unchanged += len(entry.documents)

    def count_file(self, file: PreparedFile) -> None:
        self.report.documents.added += len(file.documents) if file.is_new else 0
        self.report.documents.changed += 0 if file.is_new else len(file.documents)
        self.events.took(file.entry.path, "added" if file.is_new else "changed", len(file.chunks))

    def removed(self, entry: FileEntry) -> None:
        self.report.documents.removed += len(entry.documents)
        self.events.took(entry.path, "removed", 0)


_SPEED, _FORMAT = "speeds/ingest.json", 1
_MIN_TOKENS = 1000  # of a run whose speed is worth remembering


def kv_bytes_a_token(folder: Path, dtype: str) -> int:
    """Return the approximate KV bytes of a token; 0 if unknown. `transformers` would import torch."""
    try:
        config = parsed((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        heads, of_queries = (config.get(name) for name in ("num_key_value_heads", "num_attention_heads"))
        width = config.get("head_dim") or config["hidden_size"] // of_queries
        layers = config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
        return int(2 * layers * (heads or of_queries) * width * (4 if dtype == "float32" else 2))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return 0


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that a path, which may not exist yet, is on."""
    return disk_free(next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir()))


def seconds_a_token(store: Store | None, fingerprint: str, options: IngestOptions) -> float | None:
    """Read the speed of the last ingest on this machine; None: unknown."""
    speed = store.read_side(_SPEED, **_marks(fingerprint, options)).get("tokens_per_second") if store else None
    return 1 / speed if isinstance(speed, float) and speed > 0 else None


def _marks(fingerprint: str, options: IngestOptions) -> dict[str, Any]:
    machine = [platform.node(), cpu_name(), cores()]
    marks = {"format": _FORMAT, "fingerprint": fingerprint, "machine": machine}
    return marks | {"device": options.device, "dtype": options.dtype}
