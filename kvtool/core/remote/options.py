"""What can be set of the link to a shared store."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.cache.options import STORE
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
