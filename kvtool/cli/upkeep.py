"""`kvtool store forget|budget|prune|compact|pin|unpin`: what goes from a store, and what stays."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.codec.levels import MAX_LOSS
from kvtool.core.common.sizes import counted
from kvtool.core.common.sizes import shown_size as sized
from kvtool.core.errors import EXIT_NO_SPACE, KvtoolError
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.upkeep.budget import Budget
    from kvtool.core.upkeep.job import PruneReport

Targets = Annotated[
    list[str], typer.Argument(metavar="PATH|GLOB|ID...", help="Documents: a path, a folder, a glob, a chunk's id.")
]


def tell_budget(run: Run, max_size: int | None) -> None:
    """Where the store has a budget of its own, say that `--max-size` takes its place."""
    from kvtool.core.cache.store import Store

    if max_size is None:
        return
    with suppress(KvtoolError), Store.open(run.folder) as store:  # else the command itself tells
        kept = store.budget()
        if kept is not None and kept != max_size:
            run.out.status(f"--max-size {sized(max_size)} takes the place of the store's own budget of {sized(kept)}")


@takes(ForgetOptions, StoreOptions, examples=("store forget notes.md --dry-run", 'store forget "drafts/*.md"'))
def forget(run: Run, targets: Targets) -> None:
    """Forget documents, and the chunks that nobody else refers to."""
    from kvtool.core.upkeep.forget import forget as run_forget

    options = run.get(ForgetOptions)
    dry_run = options.dry_run
    plan = run_forget(run.folder, targets, dry_run=dry_run, yes=options.yes, lock_wait=options.lock_wait)
    chunks = sum(step.chunks for step in plan.steps)
    value: dict[str, Any] = {"dry_run": dry_run, "sources": list(plan.sources), "chunks": chunks, "bytes": plan.size}
    value["refused"] = None if plan.refusal is None else plan.refusal.message
    _warn_of(run, plan.refusal)

    def show() -> None:
        for source in plan.sources:
            run.out.print(source.replace("\n", "\\n"))
        what = "would be forgotten" if dry_run else "forgotten"
        count = f"{counted(len(plan.sources), 'document')}, {counted(chunks, 'chunk')}"
        run.out.print(f"{what}: {count}, {sized(plan.size)}")

    run.out.report(value, human=show)


def _warn_of(run: Run, refusal: KvtoolError | None) -> None:
    if refusal is not None:
        run.out.warning(f"without --dry-run this is refused: {refusal.message}", refusal.hint)


@takes(StoreOptions, LockOptions, examples=("store budget", "store budget 20GB"))
def budget(
    run: Run,
    size: Annotated[
        str | None, typer.Argument(metavar="SIZE|none", help="Such as 20GB; none lifts it.", show_default=False)
    ] = None,
) -> None:
    """Show, set or lift the size budget that the store keeps to."""
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.budget import keep_budget, read_budget

    path = run.folder
    if size is None:
        with Store.open(path) as store:
            held = read_budget(store)
    else:
        held = keep_budget(path, size, lock_wait=run.lock_wait)
        if held.budget is not None and held.used > held.budget:
            run.out.warning("the store is larger than that: nothing more is written to it", "run `kvtool store prune`")
    run.out.result(held.to_json(), human=lambda: _show_budget(run, held))


def _show_budget(run: Run, held: Budget) -> None:
    of = (
        ", no budget" if held.budget is None else f" of {sized(held.budget)}; prune goes down to {sized(held.low or 0)}"
    )
    run.out.print(f"{sized(held.used)} used{of}; {sized(held.disk_free)} free on the disk")


@takes(PruneOptions, StoreOptions, examples=("store prune --dry-run", "store prune --max-size 20GB --unused 30d"))
def prune(run: Run) -> int | None:
    """Make the store smaller.

    The coldest first, exact before coarse, KV before text.
    """
    from kvtool.core.upkeep.job import prune as run_prune

    report = run_prune(run.folder, run.get(PruneOptions))
    if report.shortfall is not None:
        run.out.warning(report.shortfall.message, report.shortfall.hint, even_quiet=True)
    _warn_of(run, report.refusal)
    if report.spared:
        run.out.warning(f"{report.spared} chunks keep their exact records: their coarser ones are damaged", "")
    if report.lossy:
        run.out.warning(*_what_is_lost(report))
    run.out.report(report.to_json(), human=lambda: _show_prune(run, report))
    return None if report.reached else EXIT_NO_SPACE


def _what_is_lost(report: PruneReport) -> tuple[str, str]:
    left = "would be left" if report.dry_run else "are left"
    allowed = f"more than the {MAX_LOSS:g} that questions allow"
    return (
        f"{counted(report.lossy, 'chunk')} {left} at levels that lose up to {report.worst:.2g} nats a token, {allowed}",
        "`kvtool compress --level 2` beforehand gives what loses less"
        if report.dry_run
        else "exact records and finer levels come of ingest into a new store",
    )


def _show_prune(run: Run, report: PruneReport) -> None:
    rows = [(row["step"], row["chunks"], row["documents"], f"{row['bytes'] / 1e6:,.1f}") for row in _rows(report)]
    if rows:
        run.out.table(("step", "chunks", "documents", "MB"), rows)
    would = "would be " if report.dry_run else ""
    run.out.print(f"{sized(report.before)} before, {would}{sized(report.after)} after")


def _rows(report: PruneReport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.to_json()["steps"]
    return rows


@takes(StoreOptions, LockOptions, examples=("store compact", "store compact --lock-wait 10m"))
def compact(run: Run) -> None:
    """Give free space back to the disk.

    Free pages go, and what nothing refers to; readers go on meanwhile.
    """
    from kvtool.core.upkeep.compact import compact as run_compact

    done = run_compact(run.folder, lock_wait=run.lock_wait)

    def show() -> None:
        run.out.print(
            f"{sized(done.before)} before, {sized(done.after)} after; {counted(done.chunks, 'chunk')} that nothing "
            f"referred to and {counted(done.profiles, 'old profile')} dropped"
        )

    run.out.report(done.to_json(), human=show)


Pinned = Annotated[
    list[str] | None, typer.Argument(metavar="PATH|GLOB|ID...", help="Documents or chunks.", show_default=False)
]


@takes(StoreOptions, LockOptions, examples=("store pin handbook.md", "store pin"))
def pin(run: Run, targets: Pinned = None) -> None:
    """Keep documents or chunks from being pruned.

    Without a name, list what is pinned.
    """
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.pins import pin as run_pin

    path = run.folder
    if targets:
        pins = run_pin(path, targets, lock_wait=run.lock_wait)
    else:
        with Store.open(path) as store:
            pins = store.pins()
    _show_pins(run, pins)


@takes(StoreOptions, LockOptions, examples=("store unpin handbook.md", 'store unpin "drafts/*.md"'))
def unpin(run: Run, targets: Targets) -> None:
    """Let documents or chunks be pruned again."""
    from kvtool.core.upkeep.pins import unpin as run_unpin

    _show_pins(run, run_unpin(run.folder, targets, lock_wait=run.lock_wait))


def _show_pins(run: Run, pins: dict[str, Any]) -> None:
    def show() -> None:
        for name in (*pins["sources"], *pins["chunks"]) if run.out.verbosity >= 0 else ():
            run.out.print(name.replace("\n", "\\n"))
        if not pins["sources"] and not pins["chunks"]:
            run.out.status("nothing is pinned")

    run.out.result(pins, human=show)
