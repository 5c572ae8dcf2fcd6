from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtool.core.codec.levels import MAX_LOSS


@dataclass(slots=True)
class LevelReport:
    level: str
    chunks: int = 0
    bytes: int = 0  # records that are read for it, the coarser ones that it refines included
    elements: int = 0  # numbers in K and V
    error: float = 0.0  # sum of the relative errors over layers and sides, weighted by elements
    loss: dict[str, float] = field(default_factory=dict)  # `kl_first`, `kl_answer`, `top1_agrees`, `questions`

    def to_json(self) -> dict[str, Any]:
        bits = 8 * self.bytes / self.elements if self.elements else 0.0
        return {
            "level": self.level,
            "chunks": self.chunks,
            "bytes": self.bytes,
            "bits_per_element": round(bits, 4),
            "ratio_vs_16bit": round(16 / bits, 3) if bits else None,
            "ratio_vs_8bit": round(8 / bits, 3) if bits else None,
            "relative_error": round(self.error / self.elements, 6) if self.elements else 0.0,
            **self.loss,
        }


@dataclass(slots=True)
class CompressReport:
    levels: list[LevelReport] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0
    encoded: int = 0  # chunks of this run
    kept: int = 0  # chunks that had the level already
    skipped: int = 0  # chunks that no exact record is left of, so they stay as they are
    dropped: int = 0
    file_before: int = 0  # bytes of the data file
    file_after: int = 0
    file_without_exact: int | None = None  # bytes without the exact records next to these levels; None: there are none
    loss: float | None = None  # of the level that a question would read, in nats a token; None: not measured
    max_loss: float = MAX_LOSS  # what it may lose
    encoded_bytes: int = 0  # of raw numbers
    encode_seconds: float = 0.0
    decoded_bytes: int = 0
    decode_seconds: float = 0.0
    profile: dict[str, Any] | None = None
    fitted: bool = False  # the profile was fitted in this run
    warnings: list[str] = field(default_factory=list)

    @property
    def freed(self) -> int:
        return max(0, self.file_before - self.file_after)

    @property
    def is_allowed(self) -> bool:
        return self.loss is not None and self.loss <= self.max_loss

    def to_json(self) -> dict[str, Any]:
        return {
            "levels": [level.to_json() for level in self.levels],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "file_bytes_before": self.file_before,
            "file_bytes_after": self.file_after,
            "file_bytes_without_exact": self.file_without_exact,
            "bytes_freed": self.freed,
            "loss": self.loss,
            "max_loss": self.max_loss,
            "seconds": self.seconds,
            "encode_gb_per_s": _rate(self.encoded_bytes, self.encode_seconds),
            "decode_gb_per_s": _rate(self.decoded_bytes, self.decode_seconds),
            "chunks": {
                "encoded": self.encoded,
                "unchanged": self.kept,
                "skipped": self.skipped,
                "exact_dropped": self.dropped,
            },
            "profile": self.profile,
            "warnings": self.warnings,
        }


def _rate(size: int, seconds: float) -> float | None:
    return round(size / seconds / 1e9, 3) if seconds else None
