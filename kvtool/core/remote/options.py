"""What can be set of the link to a shared store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtool.core.cache.options import STORE, LockOptions, max_size_option
from kvtool.core.codec.levels import check_level
from kvtool.core.options.option import Options, option
from kvtool.core.remote.blobs import TIMEOUT


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(Options, sections=("query",)):
    """How patient to be with a shared store."""

    remote_timeout: float = option(
        TIMEOUT,
        "How long a shared store may take for a value before it counts as gone.",
        group=STORE,
        metavar="SECONDS",
        unit="duration",
        lowest=0.001,
    )


def levels_option() -> tuple[str, ...]:
    """Levels of the KV that is moved, each once; empty: all. Several may stand in one word, with commas."""
    return option((), "Only KV of these levels.", setting=False, metavar="LEVEL", read=_levels, instead="all")


def _levels(given: Iterable[str]) -> tuple[str, ...]:
    words = [word.strip() for text in given for word in text.split(",")]
    return tuple(dict.fromkeys(check_level(word) for word in words if word))


@dataclass(frozen=True, kw_only=True)
class PushOptions(RemoteOptions):
    """What is sent to a shared store."""

    delete: bool = option(False, "Forget there what the store does not have.", setting=False)
    verify: bool = option(False, "Read back what is there, and send again what is damaged.", setting=False)
    dry_run: bool = option(False, "Change nothing; count what would be sent and deleted.", setting=False)
    yes: bool = option(False, "Let --delete take more than half of what is there.", setting=False)


@dataclass(frozen=True, kw_only=True)
class PullOptions(RemoteOptions, LockOptions):
    """What is fetched from a shared store."""

    level: tuple[str, ...] = levels_option()
    delete: bool = option(False, "Forget files that are not there.", setting=False)
    dry_run: bool = option(False, "Change nothing; count what would be fetched and forgotten.", setting=False)
    yes: bool = option(False, "Let --delete take more than half of the files.", setting=False)
    max_size: int | None = max_size_option()
