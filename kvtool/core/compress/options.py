from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
