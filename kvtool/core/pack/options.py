"""Options of packs."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.cache.options import LockOptions, max_size_option
from kvtool.core.options.option import option
from kvtool.core.remote.options import MOVED, SignOptions, TrustOptions, levels_option


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SignOptions, settings=False, group=MOVED):
    """Options of what a pack holds."""

    only: tuple[str, ...] = option((), "Export only these documents.", metavar="PATH|GLOB|ID", instead="all")
    levels: tuple[str, ...] = levels_option()
    force: bool = option(False, "Replace an existing file.")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(LockOptions, TrustOptions):
    """Options of an import."""

    max_size: int | None = max_size_option()
