"""A store and a shared one that is named by its URL, brought up to date as options say."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvtool.core.cache.options import StoreOptions
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.remote.options import PullOptions, PushOptions
from kvtool.core.remote.pull import preview, pull
from kvtool.core.remote.push import push
from kvtool.core.remote.transfer_report import TransferReport
from kvtool.core.remote.urls import open_blobs


def push_to(url: str, folder: Path, options: PushOptions, events: Events) -> TransferReport:
    """Send what a shared store lacks. Raises as :func:`push` does."""
    with closing(open_blobs(url, options.remote_timeout)) as blobs, Store.open(folder) as store:
        return push(
            store,
            blobs,
            delete=options.delete,
            verify=options.verify,
            dry_run=options.dry_run,
            yes=options.yes,
            key=options.key,
            events=events,
        )


def pull_from(
    url: str, folder: Path, options: PullOptions, events: Events, store: StoreOptions | None = None
) -> TransferReport:
    """Fetch what a store lacks, or with `dry_run` say what that is. Raises as :func:`pull` does."""
    levels, trust = options.levels or None, options.trusted(store)
    with closing(open_blobs(url, options.remote_timeout)) as blobs:
        if options.dry_run:
            return preview(folder, blobs, levels=levels, delete=options.delete, trust=trust)
        return pull(
            folder,
            blobs,
            levels=levels,
            delete=options.delete,
            trust=trust,
            lock_wait=options.lock_wait,
            max_size=options.max_size,
            timeout=options.remote_timeout,
            yes=options.yes,
            events=events,
        )
