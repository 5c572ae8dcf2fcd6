"""Stores → store: what several runs made apart, put together by the rules of a pull."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.errors import StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.pack import stretches
from kvtool.core.pack.beside import StoreBlobs
from kvtool.core.pack.take import take
from kvtool.core.remote.pull import adopt
from kvtool.core.remote.signing import Trust
from kvtool.core.remote.survey import survey
from kvtool.core.remote.transfer_report import TransferReport

_SOURCES = "name folders of stores, or .kvpack files"
_SECONDS = 600.0  # for a value to come off the disk


def merge(
    path: Path,
    sources: Sequence[Path],
    *,
    trust: Trust | None = None,
    lock_wait: float = 0.0,
    max_size: int | None = None,
    events: Events | None = None,
) -> list[TransferReport]:
    """Take other stores, and packs, into a store, which is made where there is none. Run again to resume.

    Sources stay as they are, and may be written to meanwhile. Of a file that two have in two versions the one changed
    last stays, whichever comes first, unless the store has it of another origin: then it stays as it is. What of a
    source is damaged is left out, and in its report.

    Parameters
    ----------
    trust : whom the user trusts; stores are never signed, so of them it says whether they are the user's own.

    Raises
    ------
    UsageError : a source is the store itself, stands in it or around it, or is no store and no pack; nothing was
        written then.
    StoreNotFoundError : nothing was ever ingested into a source; nothing was written then.
    StoreFormatError : a source was made with another model or other settings; the sources before it were taken.
    NoSpaceError, StoreLockedError : what came stays.
    """
    for source in sources:
        _check(path, source)
    reports = []
    for source in sources:
        if source.is_dir():
            reports.append(_take_store(path, source, trust or Trust(), lock_wait, max_size, events))
        else:
            reports.append(take(path, source, trust=trust, lock_wait=lock_wait, max_size=max_size, events=events))
        reports[-1].direction = "import"
    return reports


def _check(path: Path, source: Path) -> None:
    if not source.is_dir():
        if not source.is_file():
            raise UsageError(f"there is no store and no pack at {source}", _SOURCES)
        return
    here, there = (Path(os.path.realpath(place)) for place in (path, source))
    if here == there:
        raise UsageError(f"{source} is the store to merge into", "name others, or another --store")
    if here.is_relative_to(there):
        raise UsageError(f"the store to merge into would stand inside of {source}", "name another --store, beside it")
    if there.is_relative_to(here):
        raise UsageError(f"{source} stands inside of the store to merge into", "name another --store, beside it")
    try:
        opened = Store.open(source)
    except StoreNotFoundError as error:  # its own hint is for the store of --store
        raise StoreNotFoundError(error.message, _SOURCES) from None
    with opened as store:
        if not store.manifest():
            raise StoreNotFoundError(f"the store at {source} is empty", "run `kvtool ingest PATH` for it first")


def _take_store(
    path: Path, source: Path, trust: Trust, lock_wait: float, max_size: int | None, events: Events | None
) -> TransferReport:
    origin = trust.origin(None, os.path.realpath(source))
    with (
        Store.open(source) as other,
        Store.create_or_open(path) as store,
        store.writer(lock_wait, max_size) as writer,
        other.view(),  # what is forgotten or replaced there meanwhile is still to be had
    ):
        lost: list[tuple[str, str]] = []
        catalogue, blobs = survey(other, None, lambda what, why: lost.append((what, why))), StoreBlobs(other)
        try:
            report = adopt(store, writer, blobs, catalogue, origin, None, newer=True, timeout=_SECONDS, events=events)
        except StoreFormatError as error:
            raise StoreFormatError(f"{error.message} than {source}", "merge into another --store") from error
        report.signer = trust.signer(None)
        for what, why in lost:
            report.note_damage(what, why)
        if not origin.is_foreign:
            stretches.take(store, writer, blobs, report)
        return report
