"""Opening a store: a folder, or a local store that is brought up to date with a shared tier, which stands behind it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.common.files import cache_dir
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.common.urls import place_of
from kvtool.core.errors import DamagedError, KvtoolError, RemoteError, StoreNotFoundError
from kvtool.core.remote.blobs import TIMEOUT
from kvtool.core.remote.offers import Offers
from kvtool.core.remote.reading import read_root
from kvtool.core.remote.takeover import Front
from kvtool.core.remote.tier import Tier
from kvtool.core.remote.urls import open_blobs


def open_store(
    place: Path | str,
    *,
    timeout: float = TIMEOUT,
    lock_wait: float = 0.0,
    warn: Warn = warn_nobody,
) -> Store:
    """The store at a folder or a URL. Raises as `Store.open` and `open_shared` do."""
    if isinstance(place, Path):
        return Store.open(place)
    return open_shared(place, timeout=timeout, lock_wait=lock_wait, warn=warn)


def open_shared(url: str, *, timeout: float = TIMEOUT, lock_wait: float = 0.0, warn: Warn = warn_nobody) -> Store:
    """The local store in front of the tier of a URL, with the tier behind it.

    Where the tier does not answer, is gone or cannot be used, the store stands alone with what is here already.

    Parameters
    ----------
    timeout : seconds to wait for a value.

    Raises
    ------
    RemoteError : it does not answer, and nothing of it is here yet.
    StoreNotFoundError : nothing was pushed there, and nothing of it is here yet.
    """
    blobs, place = open_blobs(url, timeout), local_place(url)
    try:
        digest, root = read_root(blobs)
    except (RemoteError, DamagedError, StoreNotFoundError) as error:
        blobs.close()
        return _alone(place, warn, error)
    store: Store | None = None
    try:
        store = Store.create_or_open(place)
        front = Front(store, blobs, digest, root, timeout, warn)
        if front.take_over(lock_wait):
            store.link = Tier(store, blobs, Offers(blobs, root), front.mark, timeout, warn)
        return store
    except BaseException:
        if store is not None:
            store.close()
        raise
    finally:
        if store is None or store.link is None:
            blobs.close()


def _alone(place: Path, warn: Warn, error: KvtoolError) -> Store:
    """Open the local store without its shared store, or raise `error` if nothing is stored locally."""
    with suppress(KvtoolError):
        store = Store.open(place)
        if store.manifest():
            warn(f"{error.message}: only what is here already is used", error.hint)
            return store
        store.close()
    raise error


def local_place(url: str) -> Path:
    """The folder of the local store in front of a URL; what is in it can be fetched again."""
    digest = hashlib.blake2b(place_of(url).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return cache_dir() / "remote" / digest
