"""What a push, a pull or a sync did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """Values that went over, and those that were there already."""

    moved: int = 0
    there: int = 0


@dataclass
class TransferReport:
    """Counts of one direction.

    Attributes
    ----------
    chunks : at a level each. `bytes` : of all that was moved.
    removed : files of a store, or values of a tier (`removed_bytes`), `forgotten` : documents of a tier.
    spared : values of a tier that were to go and did not, because another push was running.
    dry_run : nothing was changed; these are the counts of what would have been.
    damaged : what could not be moved, and why; it was left out.
    """

    direction: str
    url: str
    files: Counts = field(default_factory=Counts)
    chunks: Counts = field(default_factory=Counts)
    removed: int = 0
    removed_bytes: int = 0
    forgotten: int = 0
    spared: int = 0
    bytes: int = 0
    dry_run: bool = False
    seconds: float = 0.0
    damaged: list[dict[str, str]] = field(default_factory=list)

    def note_damage(self, what: str, why: str) -> None:
        """Something was left out."""
        self.damaged.append({"what": what, "reason": why})

    def to_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {
            "direction": self.direction,
            "url": self.url,
            "files": {"moved": self.files.moved, "unchanged": self.files.there},
            "chunks": {"moved": self.chunks.moved, "unchanged": self.chunks.there},
            "removed": self.removed,
            "bytes_freed": self.removed_bytes,
            "forgotten": self.forgotten,
            "spared": self.spared,
            "dry_run": self.dry_run,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "damaged": self.damaged,
        }
