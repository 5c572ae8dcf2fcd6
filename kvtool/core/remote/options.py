"""Options of transfers between stores, and their report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.options import STORE, LockOptions, StoreOptions, max_size_option
from kvtool.core.codec.levels import LEVELS, NAMES
from kvtool.core.options.option import Options, option
from kvtool.core.remote.blobs import TIMEOUT

if TYPE_CHECKING:
    from kvtool.core.remote.signing import SigningKey, Trust

MOVED, TRUSTED = "Transfer", "Trust"  # headings in the commands' help


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(Options, sections=("query",)):
    remote_timeout: float = option(
        TIMEOUT, "Maximum wait for an answer of a shared store.", group=STORE, unit="duration", lowest=0.001
    )


def levels_option() -> tuple[str, ...]:
    return option(
        (),
        "Copy only KV of these levels.",
        group=MOVED,
        flag="--level",
        setting=False,
        choices=LEVELS,
        metavar=NAMES,
        instead="all",
    )


@dataclass(frozen=True, kw_only=True)
class SignOptions(Options, settings=False, group=TRUSTED):
    sign: Path | None = option(None, "Sign with this Ed25519 private key.", metavar="KEY")

    @property
    def key(self) -> SigningKey | None:
        from kvtool.core.remote.signing import signing_key

        return None if self.sign is None else signing_key(self.sign)


@dataclass(frozen=True, kw_only=True)
class TrustOptions(Options, group=TRUSTED):
    trust: tuple[str, ...] = option(
        (),
        "Trust what is signed by a public key of this file.",
        metavar="FILE",
        unit="path",
        user_only=True,
        instead="nobody",
    )
    mine: bool = option(False, "Treat the data as your own, because you made it.", setting=False)

    def trusted(self, store: StoreOptions | None = None) -> Trust:
        from kvtool.core.remote.signing import Trust

        return Trust.of(self.trust, required=store is not None and store.require_signature, mine=self.mine)


@dataclass(frozen=True, kw_only=True)
class PushOptions(RemoteOptions, SignOptions, settings=False, group=MOVED):
    delete: bool = option(False, "Remove from the shared store what this store lacks.")
    verify: bool = option(False, "Check what is there, and send damaged data again.")
    dry_run: bool = option(False, "Show what would be sent and removed, and do nothing.")
    yes: bool = option(False, "Let --delete remove more than half.")


@dataclass(frozen=True, kw_only=True)
class PullOptions(RemoteOptions, LockOptions, TrustOptions, settings=False, group=MOVED):
    levels: tuple[str, ...] = levels_option()
    delete: bool = option(False, "Remove files that the shared store lacks.")
    dry_run: bool = option(False, "Show what would be copied and removed, and do nothing.")
    yes: bool = option(False, "Let --delete remove more than half of the files.")
    max_size: int | None = max_size_option()


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SignOptions, settings=False, group=MOVED):
    only: tuple[str, ...] = option((), "Export only these documents.", metavar="PATH|GLOB|ID", instead="all")
    levels: tuple[str, ...] = levels_option()
    force: bool = option(False, "Replace an existing file.")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(LockOptions, TrustOptions):
    max_size: int | None = max_size_option()
