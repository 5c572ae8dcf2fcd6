"""`kvtool store warm`: what is asked often, fetched before it is asked for again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.job_view import JobView
from kvtool.cli.options import Run, open_any_store, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.common.sizes import shown_size as sized
from kvtool.core.errors import EXIT_DAMAGED, UsageError
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import MOVED, RemoteOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.query.asked import Asked
    from kvtool.core.remote.warm import WarmReport

# By which questions find and read.
_READ = ("top_k", "min_score", "only", "retriever", "embedder", "level", "max_loss", "offline")


@dataclass(frozen=True, kw_only=True)
class WarmOptions(Options, settings=False, group=MOVED):
    """What is fetched into the store in front of a shared one."""

    journal: Path | None = option(
        None,
        "What was asked: a JSON-lines file of questions, of answers or of `kvtool serve`'s log, or a store's folder.",
        flag="--from",
        metavar="JOURNAL",
        unit="path",
        instead="what was asked here",
    )
    dry_run: bool = option(False, "Fetch nothing; count what would come.")


@takes(
    WarmOptions,
    QueryOptions.some(*_READ),
    StoreOptions,
    RemoteOptions,
    LockOptions,
    examples=(
        "store warm --store s3://bucket/kv --from questions.jsonl",
        "store warm --store s3://bucket/kv --dry-run",
    ),
)
def warm(run: Run) -> int | None:
    """Fetch ahead what is asked often.

    It comes into the store in front of a shared one, the warmest first, as far as the budget goes; what is asked as
    often stays. Run again to resume.
    """
    from kvtool.core.remote.warm import warm as run_warm

    options, place = run.get(WarmOptions), run.get(StoreOptions).place
    if isinstance(place, Path):
        raise UsageError(f"{place} is no shared store", "--store takes a URL, such as s3://BUCKET/FOLDER")
    reading = run.get(QueryOptions)
    with open_any_store(run) as store:
        asked = _asked(run, store, options.journal, reading)
        with JobView(run) as view:
            report = run_warm(
                store,
                asked.warmth,
                level=reading.level,
                max_loss=reading.max_loss,
                lock_wait=run.lock_wait,
                dry_run=options.dry_run,
                events=view.events,
            )
    for row in report.damaged:
        what = f"left out: chunk {row['chunk']} at level {row['level']}: {row['reason']}"
        run.out.warning(what, "push again with --verify")
    value = report.to_json() | {"lines": asked.lines, "passed_over": asked.passed}
    run.out.report(value, human=lambda: run.out.print(_in_words(report)))
    return EXIT_DAMAGED if report.damaged else None


def _asked(run: Run, store: Store, journal: Path | None, reading: QueryOptions) -> Asked:
    """What the journal asks for; without one, what was asked of this store in front."""
    from kvtool.core.query.asked import Asked, read_asked
    from kvtool.core.retrieval.finder import Finder

    if journal is None:
        known = {*store.chunk_ids()}
        return Asked({chunk: warmth for chunk, warmth in store.warmth().items() if chunk in known})
    asked = read_asked(journal, store, Finder(store, run.out.warning), reading, time.time())
    if asked.passed:
        run.out.status(f"{counted(asked.passed, 'line')} of {journal} passed over, by which nothing is asked for here")
    return asked


def _in_words(report: WarmReport) -> str:
    would = "would be " if report.dry_run else ""
    of = "" if report.budget is None else f", which may hold {sized(report.budget)}"
    if not report.asked:
        return f"nothing was asked yet: only the prompt's own beginning {would or 'is '}fetched into {report.path}"
    more = f"; no room for {counted(report.left, 'chunk')} more" if report.left else ""
    more += f"; of {counted(report.absent, 'chunk')} nothing is there to fetch" if report.absent else ""
    return (
        f"{counted(report.fetched, 'chunk')} ({sized(report.bytes)}) {would}fetched into {report.path}{of}{more}\n"
        f"of what is asked {report.hits_after:.0%} {would or 'is '}here, {report.hits_before:.0%} before"
    )
