"""Plan of a prune, in steps, with the bytes that each step frees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtool.core.errors import UsageError

UNFINISHED = "unfinished"  # the step by which what interrupted ingests have stored goes
Drop = tuple[bytes, str]  # chunk, level


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a plan drops one kind of thing.

    Attributes
    ----------
    name : `unreferenced`, `unfinished`, `stretches`, `cold`, `exact`, `level N`, `kv`, `profile`, `documents`.
    drops : levels of chunks.
    sources : documents that are forgotten whole.
    loose : chunks that nobody refers to, or nobody then, of which everything goes.
    stretches : of answered prompts.
    profiles : of the codec, by digest.
    size : bytes that the step gives back once the store is compacted.
    """

    name: str
    drops: tuple[Drop, ...] = field(default=(), repr=False)  # raw ids, which nobody can read
    sources: tuple[str, ...] = ()
    loose: tuple[bytes, ...] = field(default=(), repr=False)
    size: int = 0
    stretches: tuple[bytes, ...] = field(default=(), repr=False)
    profiles: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def is_empty(self) -> bool:
        """Return True if the step drops nothing."""
        return not (self.drops or self.sources or self.loose or self.stretches or self.profiles)

    @property
    def chunks(self) -> int:
        """Return the number of chunks that the step touches."""
        return len({chunk for chunk, _ in self.drops} | set(self.loose))

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return {
            "step": self.name,
            "chunks": self.chunks,
            "chunk_levels": len(self.drops),
            "documents": len(self.sources),
            "stretches": len(self.stretches),
            "bytes": self.size,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in their order.

    Attributes
    ----------
    expected : bytes of the folder afterwards, at most, once it is compacted.
    goal : bytes that were asked for; None: no size was.
    refusal : of a rehearsal: why it would not be done as it was asked for; None: it would.
    """

    steps: tuple[Step, ...]
    expected: int
    goal: int | None = None
    refusal: UsageError | None = field(default=None, compare=False)

    @property
    def reaches(self) -> bool:
        """Return True if the plan meets the goal."""
        return self.goal is None or self.expected <= self.goal

    @property
    def sources(self) -> tuple[str, ...]:
        """Documents that are forgotten."""
        return tuple(source for step in self.steps for source in step.sources)

    @property
    def size(self) -> int:
        """Bytes that all steps give back."""
        return sum(step.size for step in self.steps)


NOTHING = Plan((), 0)


@dataclass(slots=True)
class Growing:
    """A step as it is put together, a document at a time."""

    name: str
    drops: list[Drop] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    loose: list[bytes] = field(default_factory=list)
    size: int = 0
    stretches: list[bytes] = field(default_factory=list)
    profiles: list[bytes] = field(default_factory=list)

    def done(self) -> Step:
        """The step."""
        lists = (tuple(self.drops), tuple(self.sources), tuple(self.loose))
        return Step(self.name, *lists, self.size, tuple(self.stretches), tuple(self.profiles))
