"""Options of a compression, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache.options import LockOptions, max_size_option
from kvtool.core.codec.levels import MAX_LOSS, SHARES, WHOLE
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import option

AUTO = "auto"
FIT_PROMPTS = 32
LEVEL, PROFILE = "Level", "Fitted statistics"  # headings in the command's help


@dataclass(frozen=True, kw_only=True)
class CompressOptions(ModelOptions, LockOptions, settings=False):
    """`max_loss` in nats a token of the answer; `chunks` are ids in hex; `keep` multiplies with the level."""

    levels: tuple[str, ...] = option(
        (),
        "Compression level to store: 1 loses least; auto: the smallest within --max-loss.",
        group=LEVEL,
        flag="--level",
        choices=(AUTO, *WHOLE),
        metavar="1..4|auto|lossless|cachegen-1..4",
        instead="2",
    )
    keep: float | None = option(
        None,
        "Store only this share of each chunk's tokens, those with most attention: .75, .5 or .25.",
        group=LEVEL,
        metavar="SHARE",
        unit="percentage",
        instead="all",
    )
    max_loss: float | None = option(
        None,
        "Maximum loss (KL divergence) for `auto` and --drop-raw, in nats per token.",
        group=LEVEL,
        lowest=0,
        instead="0.01, like query",
    )
    questions: int = option(8, "Number of prompts to measure the loss on; 0 measures nothing.", group=LEVEL, lowest=0)
    chunks: tuple[str, ...] = option((), "Compress only these chunks.", group=LEVEL, metavar="ID")
    keep_raw: bool | None = option(
        None,
        "Keep or remove the exact KV after compression.",
        group=LEVEL,
        flag="--keep-raw/--drop-raw",
        instead="keep; a terminal asks",
    )
    yes: bool = option(False, "Remove exact KV even if the loss exceeds --max-loss.", group=LEVEL)
    fit: bool = option(False, "Fit the codec to this store again, as the first run always does.", group=PROFILE)
    fit_prompts: int = option(
        FIT_PROMPTS, "Number of prompts to fit on; fewer are faster and lose more.", group=PROFILE, lowest=1
    )
    profile: Path | None = option(
        None, "Use the statistics that were fitted to another store.", group=PROFILE, metavar="STORE", unit="path"
    )
    max_size: int | None = max_size_option()

    def check(self) -> None:
        super().check()
        if self.share not in (100, *SHARES) or self.share != 100 * (1.0 if self.keep is None else self.keep):
            raise UsageError(f"there is no level that keeps {self.keep:g} of the rows", "give .75, .5 or .25")
        if self.fit and self.profile is not None:
            raise UsageError("--fit and --profile exclude each other", "give one of them")

    @property
    def drops_exact(self) -> bool:
        return self.keep_raw is False

    @property
    def share(self) -> int:
        return 100 if self.keep is None else round(100 * self.keep)

    @property
    def allowed_loss(self) -> float:
        return MAX_LOSS if self.max_loss is None else self.max_loss


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
