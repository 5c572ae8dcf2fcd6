"""Garbage collection of a shared store: deletes values of kvtool that no valid catalogue and no push refers to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, KvtoolError, RemoteError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote.blobs import LEASES, Blobs
from kvtool.core.remote.catalogue import HEAD, Catalogue, catalogue_name, digest_of, is_own, unseal_head
from kvtool.core.remote.catalogue_io import read_head, root_of, with_shards
from kvtool.core.remote.report import TransferReport

KEPT = 2  # catalogues before the one in force: readers that hold one go on with it
_MOST_BEFORE = 64  # that a head names, while other pushes leave no time to reclaim them
_DELETED_AT_ONCE = 1000


def own_names(names: set[str]) -> set[str]:
    nested = tuple(name.removesuffix(HEAD) for name in names if name.endswith(f"/{HEAD}"))
    return {name for name in names if is_own(name) and not name.startswith(nested)}


def check_ours(blobs: Blobs) -> None:
    """Refuse to push where other things are, and no `head` of ours says that they may be there. A push that was cut off
    before its first head leaves values of ours, and nothing else."""
    names = set(blobs.names())
    foreign = sorted(names - own_names(names))
    if HEAD in names and not foreign and not _is_head(blobs):
        values = ((name, blobs.get([name])[0]) for name in names if name.startswith("catalogue/"))
        ours = any(value is not None and catalogue_name(digest_of(value)) == name for name, value in values)
        foreign = [] if ours else [HEAD]
    if foreign:
        more = f" and {len(foreign) - 1:,} more" if len(foreign) > 1 else ""
        raise StoreFormatError(
            f"{blobs.url} is not empty and holds no store of kvtool's: {foreign[0]}{more}",
            "name an empty or a new folder; in Redis another database or ?prefix=",
        )


def _is_head(blobs: Blobs) -> bool:
    (head,) = blobs.get([HEAD])
    with suppress(DamagedError):
        return head is not None and bool(unseal_head(head))
    return False


def check_share(listed: set[str], mine: Catalogue, theirs: Catalogue | None, url: str) -> None:
    blobs = {name for name in listed if name != HEAD and not name.startswith(("catalogue/", "shard/"))}
    gone = blobs - mine.blobs()
    documents = theirs.files if theirs is not None else {}
    forgotten = documents.keys() - mine.files.keys()
    if 2 * len(gone) > len(blobs) or 2 * len(forgotten) > len(documents):
        raise UsageError(
            f"--delete would forget {len(forgotten):,} of {len(documents):,} documents of {url} and delete "
            f"{len(gone):,} of {len(blobs):,} values",
            "look at it with --dry-run; if that is what you want, add --yes",
        )


class GarbageCollector:
    def __init__(self, blobs: Blobs, lease: Lease, report: TransferReport, events: Events) -> None:
        self.blobs, self._lease, self._report, self._events = blobs, lease, report, events

    def run(self, listed: set[str]) -> None:
        """Delete those of the listed names to which the catalogue in force does not refer. They were listed when the
        push began: later ones stay."""
        gone: set[str] = set()
        head, wanted = self._in_force()
        with self._lease.sweeping() as alone:
            while doomed := sorted(listed - wanted - gone)[:_DELETED_AT_ONCE]:
                if not alone():
                    count = len(listed - wanted - gone)
                    self._report.removals_deferred += count
                    text = f"{count:,} values of {self.blobs.url} were left there: another push is running"
                    self._events.warn(text, "delete later")
                    break
                if self.blobs.get([HEAD])[0] != head:
                    head, wanted = self._in_force()
                    continue
                self._delete(doomed)
                gone.update(doomed)

    def reclaim(self, head: bytes, joined: Catalogue, theirs: Catalogue, digest: str) -> tuple[str, ...]:
        """Delete values to which only catalogues long out of force refer, unless `head` is no longer in force: another
        push may count on just those values by now. Return the earlier catalogues that stay valid with the next head,
        which is of `joined` and its `digest`."""
        was = unseal_head(head)
        before = tuple(dict.fromkeys((was.catalogue, *was.before)))
        kept, old = before[:KEPT], before[KEPT:]
        if not old:
            return before
        with self._lease.sweeping() as alone:
            wanted = joined.blobs() | theirs.blobs()
            wanted |= self._counted_on(kept[1:], wanted)
            doomed = self._counted_on(old, wanted) - wanted
            names = {catalogue_name(each) for each in old if each != digest}
            others = sorted(doomed)
            parts = [others[at : at + _DELETED_AT_ONCE] for at in range(0, len(others), _DELETED_AT_ONCE)]
            for some in (*parts, sorted(names)):  # the catalogues last: they know the others
                if not alone() or self.blobs.get([HEAD])[0] != head:
                    return before[:_MOST_BEFORE]
                self._delete(some)
        return kept

    def _counted_on(self, digests: Iterable[str], known: set[str]) -> set[str]:
        names: set[str] = set()
        for digest in digests:
            try:
                root = root_of(self.blobs, digest)
                seen = known | names
                fresh = [number for number, shard in enumerate(root.shards) if shard and shard.name not in seen]
                names |= set(filter(is_own, with_shards(self.blobs, root, fresh).blobs()))
            except DamagedError:  # another push has reclaimed it
                continue
        return names

    def _in_force(self) -> tuple[bytes, set[str]]:
        try:
            head, catalogue = read_head(self.blobs)
        except StoreNotFoundError:
            raise RemoteError(f"the head of {self.blobs.url} has vanished", "push again") from None
        return head, {HEAD, catalogue_name(unseal_head(head).catalogue), *catalogue.blobs()}

    def _delete(self, names: list[str]) -> None:
        self._report.bytes_freed += sum(self.blobs.sizes(names))
        self._report.removed += len(names)
        self.blobs.delete(names)


# ---- leases of pushes and deletions --------------------------------------------------------------------------------
#
# A deletion first announces itself, then looks for running pushes; a push does the reverse. So at least one of the two
# sees the other: the deletion stops, the push waits, and only then asks what the shared store has already.

_RENEWED_EVERY = min(LEASES.values()) / 4
_LOOK_EVERY = 0.1  # seconds, while another one deletes
_LONGER = 5.0  # seconds to wait for what should be over by then


class Lease:
    """The lease by which a running push is seen by others."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._id = secrets.token_hex(8)
        self._renewed = float("-inf")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold it; entered when no other process deletes."""
        self.renew()
        try:
            # A deletion stops at its next values. A lease that outlives a dead process was taken by a wrong clock.
            until = time.monotonic() + LEASES["sweep"] + _LONGER
            while self._others("sweep") and time.monotonic() < until:
                time.sleep(_LOOK_EVERY)
                self._hold("push")
            yield
        finally:
            self._release("push")

    def renew(self) -> None:
        if time.monotonic() - self._renewed > _RENEWED_EVERY:
            self._hold("push")

    @contextmanager
    def sweeping(self) -> Iterator[Callable[[], bool]]:
        """Announce a deletion. Yields a check for right before each deletion: True if no push is running."""

        def alone() -> bool:
            self._hold("sweep")
            self._hold("push")
            return not self._others("push")

        self._hold("sweep")
        try:
            yield alone
        finally:
            self._release("sweep")

    def _hold(self, what: str) -> None:
        self._blobs.hold(f"{what}-{self._id}")
        self._renewed = time.monotonic()

    def _release(self, what: str) -> None:
        with suppress(KvtoolError):  # the shared store is gone: the lease expires
            self._blobs.release(f"{what}-{self._id}")

    def _others(self, what: str) -> bool:
        return any(name.startswith(f"{what}-") for name in self._blobs.held() - {f"{what}-{self._id}"})
