"""What a push, a pull or a sync did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """Values that went over, and those that were there already."""

    moved: int = 0
    there: int = 0


@dataclass
class Events:
    """Told while it goes on: the number of chunks at a level to move, each one moved, and warnings (text, hint)."""

    total: Callable[[int], None] = lambda count: None
    advance: Callable[[int], None] = lambda count: None
    warn: Callable[[str, str], None] = lambda text, hint: None


@dataclass
class TransferReport:
    """Counts of one direction.

    Attributes
    ----------
    chunks : at a level each. `bytes` : of all that was moved.
    damaged : what could not be moved, and why; it was left out.
    """

    direction: str
    url: str
    files: Counts = field(default_factory=Counts)
    chunks: Counts = field(default_factory=Counts)
    removed: int = 0
    bytes: int = 0
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
            "files": {"moved": self.files.moved, "there": self.files.there},
            "chunks": {"moved": self.chunks.moved, "there": self.chunks.there},
            "removed": self.removed,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "damaged": self.damaged,
        }
