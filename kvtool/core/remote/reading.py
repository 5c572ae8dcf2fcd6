"""What a tier says of itself: its head, and the catalogue that this names."""

from __future__ import annotations

from kvtool.core.errors import DamagedError, StoreFormatError, StoreNotFoundError
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import catalogue_name, digest_of
from kvtool.core.remote.head import HEAD, unseal_head

_TRIES = 8  # pushes that come in between reading the head and the catalogue


def read_head(blobs: Blobs) -> tuple[bytes | None, Catalogue | None]:
    """The tier's head as it stands and its catalogue; (None, None) where nothing was ever pushed.

    Raises
    ------
    RemoteError : the tier does not answer.
    DamagedError : what is there cannot be read.
    StoreFormatError : a newer kvtool pushed.
    """
    (head,) = blobs.get([HEAD])
    for _ in range(_TRIES):
        if head is None:
            return None, None
        try:
            return head, catalogue_of(blobs, unseal_head(head).catalogue)
        except DamagedError:
            before, (head,) = head, blobs.get([HEAD])
            if head == before:
                raise
    raise DamagedError(f"the head of {blobs.url} changes all the time", "try again when no push runs")


def catalogue_of(blobs: Blobs, digest: str) -> Catalogue:
    """The catalogue of a digest. Raises DamagedError where it is lost or cannot be read, StoreFormatError."""
    (packed,) = blobs.get([catalogue_name(digest)])
    if packed is None or digest_of(packed) != digest:
        raise DamagedError(f"the catalogue of {blobs.url} is lost or damaged", "push again from a store that is whole")
    return Catalogue.unpack(packed)


def read_catalogue(blobs: Blobs) -> Catalogue:
    """The catalogue of a tier that was pushed to; raises StoreNotFoundError where nothing was, and as read_head."""
    _, catalogue = read_head(blobs)
    if catalogue is None:
        raise StoreNotFoundError(f"there is no store at {blobs.url}", f"make one with `kvtool store push {blobs.url}`")
    return catalogue


def check_same_identity(mine: dict[str, object], other: dict[str, object], url: str) -> None:
    """Raises StoreFormatError where two stores were made with another model, lead-in, split or instruction."""
    differs = sorted(key for key in {*mine, *other} - {"model"} if mine.get(key) != other.get(key))
    if differs:
        raise StoreFormatError(
            f"the store at {url} was made with another {', '.join(differs)}",
            "push to another place (another database, ?prefix= or folder), or ingest with the same settings",
        )
