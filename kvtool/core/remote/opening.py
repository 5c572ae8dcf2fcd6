"""Opening a store: a folder, or a local store that is brought up to date with a shared tier, which stands behind it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.side import read_side, write_side
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import nested, profiled
from kvtool.core.common.places import cache_dir
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.common.urls import place_of
from kvtool.core.errors import (
    DamagedError,
    KvtoolError,
    NoSpaceError,
    RemoteError,
    StoreFormatError,
    StoreLockedError,
)
from kvtool.core.remote import survey
from kvtool.core.remote.blobs import TIMEOUT, Blobs
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, digest_of
from kvtool.core.remote.front import default_budget
from kvtool.core.remote.pull import adopt
from kvtool.core.remote.reading import check_same_identity, read_catalogue
from kvtool.core.remote.tier import CATALOGUE, Tier
from kvtool.core.remote.urls import open_blobs

_ADOPTED = "remote/adopted.json"
_MOST_TOLD = 10  # damages, one by one
_RULES = 2  # by which it was taken over: a store that an older kvtool filled is brought up to date once more


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

    Where the tier does not answer, or cannot be used, the store stands alone with what is here already.

    Parameters
    ----------
    timeout : seconds to wait for a value.

    Raises
    ------
    RemoteError : it does not answer, and nothing of it is here yet.
    StoreNotFoundError : nothing was pushed there.
    """
    blobs, place = open_blobs(url, timeout), local_place(url)
    try:
        catalogue = read_catalogue(blobs)
    except (RemoteError, DamagedError) as error:
        blobs.close()
        return _alone(place, warn, error)
    store: Store | None = None
    try:
        store = Store.create_or_open(place)
        packed = catalogue.pack()
        if _take_over(store, blobs, catalogue, packed, timeout, lock_wait, warn):
            store.link = Tier(store, blobs, catalogue, digest_of(packed), timeout, warn)
        return store
    except BaseException:
        if store is not None:
            store.close()
        raise
    finally:
        if store is None or store.link is None:
            blobs.close()


def _alone(place: Path, warn: Warn, error: KvtoolError) -> Store:
    """What is here already, if anything is."""
    with suppress(KvtoolError):
        store = Store.open(place)
        if store.manifest():
            warn(f"{error.message}: only what is here already is used", error.hint)
            return store
        store.close()
    raise error


def _take_over(
    store: Store, blobs: Blobs, catalogue: Catalogue, packed: bytes, timeout: float, lock_wait: float, warn: Warn
) -> bool:
    """Bring the store up to date with a catalogue; False: the tier cannot be used, what is here can."""
    mine = store.manifest()
    try:
        if mine:
            check_same_identity(mine.get("identity", {}), catalogue.identity, blobs.url)
        _adopt(store, blobs, catalogue, packed, timeout, lock_wait, warn)
    except StoreFormatError as error:
        warn(f"{error.message}: only what is here already is used", f"start anew: remove {store.path}")
        return False
    except (StoreLockedError, NoSpaceError) as error:
        if not store.manifest():
            raise
        warn(f"what is new at {blobs.url} was not taken over: {error.message}", "")
    except RemoteError as error:
        if not store.manifest():
            raise
        warn(f"{error.message}: only what is here already is used", error.hint)
        return False
    if any(level not in chunk.makers for chunk in catalogue.chunks.values() for level in profiled(chunk.levels)):
        text = f"{blobs.url} does not say which profile its lossy records are of: --level auto leaves them alone"
        warn(text, "push to it again")
    return True


def _adopt(
    store: Store, blobs: Blobs, catalogue: Catalogue, packed: bytes, timeout: float, lock_wait: float, warn: Warn
) -> None:
    """Take over what the catalogue describes, once for each catalogue."""
    last, done = store.side_file(CATALOGUE), {"catalogue": digest_of(packed), "rules": _RULES}
    if read_side(store, _ADOPTED) == done:
        return
    with store.writer(lock_wait) as writer:
        report = adopt(store, writer, blobs, catalogue, levels=(), delete=True, timeout=timeout, mirror=True)
        if store.budget() is None and not last.exists():  # later on it is what its owner wants
            writer.set_budget(default_budget(store.path))
        _drop_stale(store, writer, catalogue, _read_before(last))
        atomic_write(last, packed)
    for damage in report.damaged[:_MOST_TOLD]:
        warn(f"{damage['what']}: {damage['reason']}", "push again with --verify")
    if len(report.damaged) > _MOST_TOLD:
        warn(f"{len(report.damaged) - _MOST_TOLD} more are damaged or missing there", "")
    if not report.damaged:
        write_side(store, _ADOPTED, done)


def local_place(url: str) -> Path:
    """The folder of the local store in front of a URL; what is in it can be fetched again."""
    digest = hashlib.blake2b(place_of(url).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return cache_dir() / "remote" / digest


# ---- what is of a catalogue no longer in force ----


def _read_before(path: Path) -> Catalogue | None:
    """The catalogue that was taken over last; None where that is not known."""
    with suppress(OSError, KvtoolError):
        return Catalogue.unpack(path.read_bytes())
    return None


def _drop_stale(store: Store, writer: Writer, catalogue: Catalogue, before: Catalogue | None) -> None:
    """Drop lossy records that are others than the tier's by now: what is fetched may refine just those.

    Parameters
    ----------
    before : the catalogue of the last time: what is the same in both was looked at then.
    """
    doomed: dict[str, list[bytes]] = {}
    for chunk_id in store.chunk_ids():
        now = catalogue.chunks.get(chunk_id.hex())
        then = before.chunks.get(chunk_id.hex()) if before is not None else None
        if now is not None and (then is None or then.levels != now.levels):
            for level in _stale(store, chunk_id, now):
                doomed.setdefault(level, []).append(chunk_id)
    for level in nested(doomed):  # the finer first: none is ever there without what it refines
        writer.drop_level(doomed[level], level)


def _stale(store: Store, chunk_id: bytes, now: Chunk) -> list[str]:
    here = [*reversed(nested(store.sizes_here(chunk_id)))]
    kept: list[str] = []
    for level in here:  # the coarser first
        if level in now.levels:
            sound = survey.holds_level(store, chunk_id, now, level)
        else:
            base = survey.stored_base(store, chunk_id, level)
            sound = base is None or base in kept
        if sound:
            kept.append(level)
    return [level for level in here if level not in kept]
