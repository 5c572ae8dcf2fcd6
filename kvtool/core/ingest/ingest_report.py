"""What an ingest did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvtool.core.corpus.walk import Skip


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


@dataclass(slots=True)
class IngestReport:
    """Tells the result of an ingest (kvtool/docs/json.md); `tokens` and `kv_bytes` count what was computed in this run.

    Attributes
    ----------
    skipped : how many files were passed over, by kind; nothing is wrong with them.
    phases : seconds of what comes beside reading and prefill: `model_download`, `model_unpack` (a GGUF file, converted
        at its first use), `model_files` (settings and tokenizer), `model_load`, `lead_in`, `index`, `gate`.
    unsupported : of these, the files without a reader, by what they are: `image`, `archive`, `binary`, an ending.
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
    dry_run: bool = False

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Speed of the prefill alone, in chunk tokens a second."""
        return self.tokens / self.prefill_seconds if self.prefill_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Make the JSON object of `ingest --json`."""
        return asdict(self) | {"prefill_tokens_per_second": self.prefill_tokens_per_second}
