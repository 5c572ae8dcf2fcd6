from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.core.cache.identity import Origin
    from kvtool.core.remote.catalogue import Proof
    from kvtool.core.remote.signing import Trust


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
