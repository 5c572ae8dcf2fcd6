"""What every contender is, once its model is loaded. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from kvtool.lab.bench.peers.task import PeerPrompt, Saved


@dataclass(frozen=True, slots=True)
class About:
    """Who a contender is, and what it found besides times."""

    version: str
    build: str
    saved: Saved | None = None
    bytes_read: int | None = None
    flops: int | None = None


class Runner(Protocol):
    """A contender with its model loaded."""

    def first(self, prompt: PeerPrompt) -> int:
        """Forget what was before, and compute a prompt; the likeliest token behind it."""

    def next(self, token: int) -> int:
        """Append a token; the likeliest one behind it."""

    def about(self, prompt: PeerPrompt) -> About:
        """What is to be said of it; called last, behind all that is timed."""


def hold_to(threads: int) -> None:
    """Keep this process, whatever libraries are in it, on as many cores as it may have threads."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:threads])
