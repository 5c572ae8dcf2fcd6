"""A command's store with its model loaded, as the shared flags say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.options import Run
from kvtool.cli.parsing import store_path

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.session import Session


def open_any_store(run: Run) -> Store:
    """The store of `--store`, a folder or a URL; what a shared one has to say is told to the user."""
    from kvtool.core.common.urls import is_url
    from kvtool.core.remote.tier import open_store

    settings = run.settings
    place = settings.store if is_url(settings.store) else store_path(settings.store)
    return open_store(place, timeout=settings.remote_timeout, lock_wait=settings.lock_wait, warn=run.out.warning)


def open_session(run: Run, store: Store) -> Session:
    """Load the model; what the session warns of is told to the user. Raises ModelError."""
    from kvtool.core.session.session import Session

    settings = run.settings
    return Session.open(
        store,
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        offline=settings.offline,
        warn=run.out.warning,
    )
