"""A command's store with its model loaded, as the shared flags say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.options import Run

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.query.session import Session


def open_session(run: Run, store: Store) -> Session:
    """Load the model; what the session warns of is told to the user. Raises ModelError."""
    from kvtool.core.query.session import Session

    settings = run.settings
    return Session.open(
        store,
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        offline=settings.offline,
        warn=run.out.warning,
    )
