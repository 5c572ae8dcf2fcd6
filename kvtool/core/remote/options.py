"""Options of transfers between stores, and their report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.options import STORE, LockOptions, StoreOptions, max_size_option
from kvtool.core.codec.levels import LEVELS, NAMES
from kvtool.core.options.option import Options, option
from kvtool.core.remote.blobs import TIMEOUT

if TYPE_CHECKING:
    from kvtool.core.cache.identity import Origin
    from kvtool.core.remote.catalogue import Proof
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


@dataclass
class Counts:
    transferred: int = 0
    unchanged: int = 0


@dataclass
class TransferReport:
    """Counts of one direction; `chunks` at a level each.

    `removed`: files of a store, or values of a shared store. `removals_deferred`: values that stay since another push
    was running. `damaged`: what was left out, and why. `origin` "": as if made here. `trusted`: whether what came may
    replace and serve the store's own. `conflicting_files` stayed, since they are of another origin. `signer`: owner of
    the signing key, "" for nobody; None: not checked.
    """

    direction: str
    url: str
    files: Counts = field(default_factory=Counts)
    chunks: Counts = field(default_factory=Counts)
    removed: int = 0
    bytes_freed: int = 0
    documents_removed: int = 0
    removals_deferred: int = 0
    bytes: int = 0
    dry_run: bool = False
    seconds: float = 0.0
    damaged: list[dict[str, str]] = field(default_factory=list)
    origin: str = ""
    trusted: bool = True
    conflicting_files: list[str] = field(default_factory=list)
    model: str = ""
    signer: str | None = None

    def note_damage(self, what: str, why: str) -> None:
        self.damaged.append({"subject": what, "reason": why})

    def judge(self, trust: Trust, proof: Proof | None, place: str = "") -> Origin:
        """Decide what comes counts as, and note it. `place`: as people know it, instead of the URL. Raises
        UntrustedError, DamagedError."""
        origin = trust.origin(proof, place or self.url)
        self.origin, self.trusted, self.signer = origin.name, not origin.is_foreign, trust.signer(proof)
        return origin

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        if self.direction == "import":  # from a path on the disk
            facts["path"] = facts.pop("url")
        return facts
