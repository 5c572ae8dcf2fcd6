"""A command's store with its model loaded, as the shared flags say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.options import Run
from kvtool.core.cache.options import StoreOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.remote.options import RemoteOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.session import Session


def open_any_store(run: Run) -> Store:
    """The store of `--store`, a folder or a URL; what a shared one has to say is told to the user."""
    from kvtool.core.cache.store import Store

    place = run.get(StoreOptions).place
    if isinstance(place, Path):
        return Store.open(place)
    from kvtool.core.remote.opening import open_shared

    timeout = run.get(RemoteOptions).remote_timeout
    return open_shared(place, timeout=timeout, lock_wait=run.lock_wait, warn=run.out.warning)


def new_session(run: Run, store: Store) -> Session:
    """A session of the store whose model is loaded when it is needed; what it warns of is told to the user."""
    from kvtool.core.session.session import Session

    return Session(store, run.get(ModelOptions), warn=run.out.warning)


def open_session(run: Run, store: Store) -> Session:
    """A session of the store with its model loaded. Raises ModelError."""
    session = new_session(run, store)
    run.out.doing(f"loading the model {session.identity.model}")
    _ = session.decoder
    return session
