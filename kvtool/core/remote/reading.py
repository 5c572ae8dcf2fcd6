"""Reading a shared store's catalogue: its head, the catalogue that the head names, and the catalogue's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvtool.core.errors import DamagedError, StoreFormatError, StoreNotFoundError
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue, value_of
from kvtool.core.remote.entries import catalogue_name, digest_of
from kvtool.core.remote.head import HEAD, unseal_head
from kvtool.core.remote.shards import FORMAT, filled, open_root
from kvtool.core.remote.shelf import Shelf

_TRIES = 8  # pushes that come in between reading the head and the catalogue
_AT_ONCE = 256  # shards that are asked for together


def read_head(blobs: Blobs) -> tuple[bytes | None, Catalogue | None]:
    """The tier's head as it stands and its whole catalogue; (None, None) where nothing was ever pushed.

    Raises
    ------
    RemoteError : the tier does not answer.
    DamagedError : what is there cannot be read.
    StoreFormatError : a newer kvtool pushed.
    """
    return _of_head(blobs, in_force)


def read_root(blobs: Blobs) -> tuple[str, Catalogue]:
    """The catalogue in force, with its digest; of one in shards nothing of what they describe.

    Raises
    ------
    StoreNotFoundError : nothing was ever pushed there.
    RemoteError, DamagedError, StoreFormatError : as read_head.
    """
    head, root = _of_head(blobs, root_of)
    if head is None or root is None:
        raise _nothing(blobs)
    return unseal_head(head).catalogue, root


def _of_head(blobs: Blobs, read: Callable[[Blobs, str], Catalogue]) -> tuple[bytes | None, Catalogue | None]:
    (head,) = blobs.get([HEAD])
    for _ in range(_TRIES):
        if head is None:
            return None, None
        try:
            return head, read(blobs, unseal_head(head).catalogue)
        except DamagedError:
            before, (head,) = head, blobs.get([HEAD])
            if head == before:
                raise
    raise DamagedError(f"the head of {blobs.url} changes all the time", "try again when no push runs")


def in_force(blobs: Blobs, digest: str) -> Catalogue:
    """The whole catalogue of a digest; copies of it, and of no other, stay here. Raises as :func:`root_of`."""
    root = root_of(blobs, digest)
    whole = with_shards(blobs, root, range(len(root.shards)))
    keep_copies(blobs, digest, root)
    return whole


def root_of(blobs: Blobs, digest: str) -> Catalogue:
    """The catalogue of a digest; of one in shards nothing of what they describe.

    Raises
    ------
    DamagedError : it is lost or cannot be read.
    StoreFormatError : a newer kvtool pushed.
    """
    ((_, packed),) = _values(blobs, [(0, digest, catalogue_name(digest))])
    return catalogue_in(packed)


def catalogue_in(packed: bytes) -> Catalogue:
    """Read the value that a head names: a catalogue, or its root. Raises DamagedError, StoreFormatError."""
    value = value_of(packed, FORMAT)
    return open_root(value) if value["format"] == FORMAT else Catalogue.of(value)


def with_shards(blobs: Blobs, root: Catalogue, numbers: Iterable[int]) -> Catalogue:
    """A catalogue with all that its shards of these numbers describe; one that has none, as it is. Raises as
    :func:`root_of`."""
    if not root.shards:
        return root
    shards = [(number, shard) for number in numbers if (shard := root.shards[number]) is not None]
    return filled(root, _values(blobs, [(number, shard.digest, shard.name) for number, shard in shards]))


def _values(blobs: Blobs, wanted: list[tuple[int, str, str]]) -> Iterator[tuple[int, bytes]]:
    """Values, each with its number, digest and name: from the shelf, or else from the tier."""
    shelf = Shelf(blobs.url)
    for at in range(0, len(wanted), _AT_ONCE):
        some = [(number, digest, name, shelf.get(digest)) for number, digest, name in wanted[at : at + _AT_ONCE]]
        came = iter(blobs.get([name for _, _, name, value in some if value is None]))
        for number, digest, _, value in some:
            if value is None:
                value = next(came)
                if value is None or digest_of(value) != digest:
                    hint = "push again from a store that is whole"
                    raise DamagedError(f"the catalogue of {blobs.url} is lost or damaged", hint)
                shelf.put(digest, value)
            yield number, value


def put_copies(blobs: Blobs, values: Iterable[bytes]) -> None:
    """Keep what was just sent of a catalogue, so that the next push from here does not fetch it."""
    shelf = Shelf(blobs.url)
    for value in values:
        shelf.put(digest_of(value), value)


def keep_copies(blobs: Blobs, digest: str, root: Catalogue) -> None:
    """Forget the copies of all catalogues but this one."""
    Shelf(blobs.url).keep({digest, *(shard.digest for shard in root.shards if shard is not None)})


def read_catalogue(blobs: Blobs) -> Catalogue:
    """The catalogue of a tier that was pushed to; raises StoreNotFoundError where nothing was, and as read_head."""
    _, catalogue = read_head(blobs)
    if catalogue is None:
        raise _nothing(blobs)
    return catalogue


def _nothing(blobs: Blobs) -> StoreNotFoundError:
    return StoreNotFoundError(f"there is no store at {blobs.url}", f"make one with `kvtool store push {blobs.url}`")


def check_same_identity(mine: dict[str, object], other: dict[str, object], url: str) -> None:
    """Raises StoreFormatError where two stores were made with another model, lead-in, split or instruction."""
    differs = sorted(key for key in {*mine, *other} - {"model"} if mine.get(key) != other.get(key))
    if differs:
        raise StoreFormatError(
            f"the store at {url} was made with another {', '.join(differs)}",
            "take another place (--store, or a database, ?prefix= or folder), or ingest with the same settings",
        )
