"""Report of an ingest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvtool.core.common.sizes import shown_size
from kvtool.core.corpus.walk import Skip

PHASES = {
    "model_download": "downloading the model, once",
    "model_hash": "hashing the model's files, once",
    "model_unpack": "unpacking the model from its GGUF file, once",
    "model_files": "reading the model's settings and tokenizer",
    "model_load": "loading the model",
    "lead_in": "computing the lead-in",
    "index": "indexing words",
    "gate": "trying the model on this store (the gate), once",
}
"""What takes time beside reading and prefill, in words."""
_NOTED_BYTES = 10**7  # of KV, from which on it is told beforehand
_MUCH_BYTES, _MUCH_SHARE = 2 * 10**9, 0.1  # of KV, or of the free disk: then what makes it smaller is named
_MINUTE = 60.0


@dataclass(slots=True)
class Documents:
    """Counts documents by what became of them."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    failed: int = 0


@dataclass(slots=True)
class Chunks:
    """Counts chunks by what became of them; `reused` ones were in the store already."""

    computed: int = 0
    reused: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of the cost of an ingest.

    Attributes
    ----------
    tokens : to be computed.
    kv_bytes : of their KV, before any compression.
    seconds : at the speed of the last ingest; None: unknown.
    disk_free : bytes that the disk has left.
    level : codec level that is stored.
    """

    tokens: int
    kv_bytes: int
    seconds: float | None
    disk_free: int
    level: str

    @property
    def is_noted(self) -> bool:
        """Return True if it is large enough to be reported in advance."""
        return self.kv_bytes >= _NOTED_BYTES

    def told(self) -> str:
        """Word it."""
        before = "" if self.level == "raw" else " before compression"
        kv, free = shown_size(self.kv_bytes), shown_size(self.disk_free)
        text = f"about {self.tokens:,} tokens to compute: {kv} of KV{before}, {free} of disk free"
        if self.seconds is not None:
            text += f"; about {self._minutes()} at the speed of the last ingest"
        return text

    def advice(self) -> str:
        """Name what makes it smaller, where it is much."""
        much = self.kv_bytes >= min(_MUCH_BYTES, _MUCH_SHARE * self.disk_free)
        hint = (
            "`--level lossless` stores it exactly in less; `kvtool compress --drop-raw` afterwards makes it far less, "
            "with some loss"
        )
        return hint if much and self.level == "raw" else ""

    def _minutes(self) -> str:
        minutes = (self.seconds or 0) / _MINUTE
        return "a minute" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


@dataclass(slots=True)
class IngestReport:
    """Tells the result of an ingest (kvtool/docs/json.md); `tokens` and `kv_bytes` count what was computed in this run.

    Attributes
    ----------
    skipped : how many files were passed over, by kind; nothing is wrong with them.
    phases : seconds of what comes beside reading and prefill, by `PHASES`.
    unsupported : of these, the files without a reader, by what they are: `image`, `archive`, `binary`, an ending.
    forecast : what it was expected to take, before the first chunk; None: no chunk was to be computed.
    failures : what should have been read and was not; with `strict` all of it.
    still_failing : what could not be read before either, and has not changed; not among `failures`.
    loss : nats a token of the answer that the level of new chunks loses; None: not measured, or none was computed.
    not_read_again : how many of both were not tried again.
    """

    documents: Documents = field(default_factory=Documents)
    chunks: Chunks = field(default_factory=Chunks)
    tokens: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Skip})
    unsupported: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    still_failing: list[dict[str, str]] = field(default_factory=list)
    not_read_again: int = 0
    loss: float | None = None
    warnings: list[str] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] | None = None
    forecast: Forecast | None = None
    dry_run: bool = False

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Speed of the prefill alone, in chunk tokens a second."""
        return self.tokens / self.prefill_seconds if self.prefill_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Make the JSON object of `ingest --json`."""
        return asdict(self) | {"prefill_tokens_per_second": self.prefill_tokens_per_second}
