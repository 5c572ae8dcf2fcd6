"""Options of jobs that can run on Ray workers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

WORKERS = "Workers"  # heading of these options in the help
LOCAL, AUTO = "local", "auto"  # auto: the cluster that this machine is part of


@dataclass(frozen=True, kw_only=True)
class RayOptions(Options):
    """Options that select the workers."""

    ray: str | None = option(
        None,
        "Compute on Ray workers.",
        group=WORKERS,
        setting=False,
        metavar="local|auto|ADDRESS",
        instead="in this process",
    )
    ray_workers: int = option(
        0,
        "Number of Ray workers.",
        group=WORKERS,
        setting=False,
        lowest=0,
        instead="one per GPU for a model, else one per 8 cores",
    )

    def check(self) -> None:
        """Refuse a number of workers without --ray."""
        if self.ray_workers and self.ray is None:
            raise UsageError("--ray-workers says how many workers of Ray, and none are asked for", "add --ray local")
