from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kvtool.core.common.sizes import shown_size
from kvtool.core.common.types import Events
from kvtool.core.corpus.walk import Skip
from kvtool.core.errors import UsageError

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
        text = f"about {self.tokens:,} tokens to compute: {kv} of KV{before}, {free} of disk free"
        if self.seconds is not None:
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
