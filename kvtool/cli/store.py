"""`kvtool store`: list, check, shrink and protect what is stored. `transfer.py` has the commands that move it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.commands import new_app
from kvtool.cli.options import Run, takes
from kvtool.cli.terminal import one_line
from kvtool.cli.transfer import export, import_, pull, push
from kvtool.core.cache.options import LockOptions, StoreOptions, VerifyOptions
from kvtool.core.common.marks import as_named_here
from kvtool.core.common.text import counted, level_rows
from kvtool.core.common.text import shown_size as sized
from kvtool.core.errors import EXIT_DAMAGED, EXIT_NO_SPACE, KvtoolError, UsageError
from kvtool.core.options.option import Options, option
from kvtool.core.upkeep.options import WHICH, ForgetOptions, ListOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.cache.integrity import Damage
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.documents import ChunkRow, DocumentRow
    from kvtool.core.upkeep.prune import PruneReport

Targets = Annotated[
    list[str], typer.Argument(metavar="PATH|GLOB|ID...", help="Documents: a path, a folder, a glob, a chunk's id.")
]
Optional = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH|GLOB|ID...", help="Documents or chunks.", show_default=False),
]
Pinned = Annotated[list[str] | None, typer.Argument(metavar="PATH|GLOB...", help="Documents.", show_default=False)]
store_app = new_app("List, check, shrink, protect and share what is stored.")


_CHUNKS = ("chunk", "tokens", "levels", "bytes", "used", "where")
_DOCUMENTS = ("chunks", "tokens", "levels", "bytes", "used", "modified", "document")
_DAY = "%Y-%m-%d"
_DIGITS = 12  # of an id, as elsewhere; `--json` has all of them


@store_app.command()
@takes(
    ListOptions,
    StoreOptions,
    examples=("store ls notes", 'store ls "reports/*.md" --chunks'),
)
def ls(run: Run, targets: Optional = None) -> None:
    """List documents, or their chunks."""
    from kvtool.core.upkeep.documents import list_documents, listed

    options = run.get(ListOptions)
    with run.open_store() as store, store.view():
        documents = list_documents(store, targets or ())

    def show() -> None:
        if options.chunks:
            run.out.table(_CHUNKS, [_chunk(document, row) for document in documents for row in document.chunks])
        else:
            run.out.table(_DOCUMENTS, map(_document, documents))

    run.out.result({} if run.out.human else listed(documents), human=show)
    if not any(document.chunks for document in documents):
        run.out.status("the store holds no document")


def _chunk(document: DocumentRow, row: ChunkRow) -> tuple[object, ...]:
    where = f"{document.source}[{row.start}:{row.end}]"
    return row.id[:_DIGITS], row.tokens, _levels(row), row.bytes, _used(row), where + _more(document)


def _document(row: DocumentRow) -> tuple[object, ...]:
    where = as_named_here(row.source) + _more(row)
    return len(row.chunks), row.tokens, _levels(row), row.bytes, _used(row), _time(row.modified, "", _DAY), where


def _levels(row: ChunkRow | DocumentRow) -> str:
    return " ".join(row.levels) or "none"


def _used(row: ChunkRow | DocumentRow) -> str:
    return _time(row.last_used, "never", f"{_DAY} %H:%M")


def _more(document: DocumentRow) -> str:
    made_by = f" (from {document.origin})" if document.origin else ""
    return f"{' (pinned)' if document.pinned else ''}{made_by}"


def _time(seconds: int | None, otherwise: str, form: str) -> str:
    return otherwise if seconds is None else time.strftime(form, time.localtime(seconds))


@store_app.command()
@takes(StoreOptions, examples=("store stats", "store stats --json"))
def stats(run: Run) -> None:
    """Show counts, sizes and the size budget."""
    from kvtool.core.upkeep.plan import sizes_of

    with run.open_store() as store:
        sizes = {"path": str(store.path)} | sizes_of(store)
    value = sizes | {"levels": level_rows(sizes["levels"])}
    run.out.result(value, human=lambda: run.out.table(("what", "value"), _flat(sizes | _in_short(sizes["prefix"]))))


def _in_short(beginning: dict[str, Any] | None) -> dict[str, Any]:
    tokens = 0 if beginning is None else beginning["tokens"]
    return {"prefix": {"tokens": tokens}}


def _flat(value: dict[str, Any], under: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        label = f"{under}{name}"
        rows.extend(_flat(inner, f"{label}.") if isinstance(inner, dict) else [(label, inner)])
    return rows


@store_app.command()
@takes(VerifyOptions, StoreOptions, examples=("store verify", "store verify --sample 1/7"))
def verify(run: Run) -> int | None:
    """Check stored data; with --repair, remove what is damaged."""
    from kvtool.core.cache.integrity import repair
    from kvtool.core.cache.integrity import verify as check
    from kvtool.core.cache.layout import RESCUE

    options = run.get(VerifyOptions)
    sample = Fraction(options.sample) if options.sample is not None else None
    with run.open_store() as store:
        texts, others = _texts(run, store, sample)
        damaged = check(store, sample) + others
        left, repaired = damaged, 0
        if damaged and options.repair:
            with store.writer(run.lock_wait) as writer:
                repaired = repair(store, writer, damaged)
            left = check(store, sample)
            if left:
                run.out.warning("some damage cannot be repaired", RESCUE)
        sizes, concerns = store.stats(), store.concerns()
    for concern in concerns:
        run.out.warning(concern)
    rows = [{"kind": d.kind, "chunk": d.chunk, "level": d.level, "layer": d.layer, "reason": d.reason} for d in damaged]
    value = {"records": sizes["records"], "bytes": sizes["bytes"], "damaged": rows, "repaired": repaired}
    value["texts_checked"] = texts
    if sample is not None:  # the counts above are the store's; of its KV only this part was read
        value["sample"] = str(sample)

    def show() -> None:
        for row in rows:
            where = f"{row['chunk']} {row['level']} layer {row['layer']}: " if row["chunk"] else ""
            run.out.print(one_line(f"damaged: {where}{row['reason']}"))
        if rows or run.out.verbosity >= 0:
            part = "" if sample is None else f", the KV of {sample} of them checked"
            dropped = f", {counted(repaired, 'entry', 'entries')} dropped" if repaired else ""
            run.out.print(f"{counted(sizes['records'], 'record')}{part}; {len(rows)} damaged{dropped}")

    run.out.result(value, human=show)
    return EXIT_DAMAGED if left else None


def _texts(run: Run, store: Store, sample: Fraction | None) -> tuple[int | None, list[Damage]]:
    """Compare documents with what was computed of them: how many, None where the model's tokenizer is not here."""
    from kvtool.core.upkeep.documents import compare_texts, stored_tokenizer

    try:
        if not store.manifest():
            return 0, []
        return compare_texts(store, stored_tokenizer(store), sample or Fraction(1))
    except KvtoolError as error:
        run.out.warning(f"texts were not compared with their chunks: {error.message}", error.hint)
        return None, []


@store_app.command()
@takes(ForgetOptions, StoreOptions, examples=("store rm notes.md --dry-run", 'store rm "drafts/*.md"'))
def rm(run: Run, targets: Targets) -> None:
    """Remove documents, and the chunks that only they use."""
    from kvtool.core.upkeep.forget import forget as run_forget

    options = run.get(ForgetOptions)
    dry_run = options.dry_run
    done = run_forget(run.folder, targets, dry_run=dry_run, yes=options.yes, lock_wait=options.lock_wait)
    value = {"dry_run": dry_run, "sources": list(done.sources), "chunks": done.chunks, "bytes": done.size}
    value["refusal"] = None if done.refusal is None else done.refusal.message
    _warn_of(run, done.refusal)

    def show() -> None:
        for source in done.sources:
            run.out.print(source.replace("\n", "\\n"))
        what = "would be removed" if dry_run else "removed"
        count = f"{counted(len(done.sources), 'document')}, {counted(done.chunks, 'chunk')}"
        run.out.print(f"{what}: {count}, {sized(done.size)}")

    run.out.report(value, human=show)


def _warn_of(run: Run, refusal: KvtoolError | None) -> None:
    if refusal is not None:
        run.out.warning(f"without --dry-run this is refused: {refusal.message}", refusal.hint)


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Options, settings=False, group=WHICH):
    budget: str | None = option(
        None, "Keep the store within this size from now on, and prune to it; none lifts the limit.", metavar="SIZE|none"
    )


@store_app.command()
@takes(
    PruneOptions,
    BudgetOptions,
    StoreOptions,
    examples=("store prune --budget 20GB", "store prune --max-size 20GB --unused 30d --dry-run"),
)
def prune(run: Run) -> int | None:
    """Shrink the store to a size: evict the least used KV first.

    Exact KV is evicted before compressed KV, and KV before text.
    """
    from kvtool.core.upkeep.prune import prune as run_prune

    options, budget = run.get(PruneOptions), run.get(BudgetOptions).budget
    if budget is not None and (size := _keep_budget(run, budget, options)) is None:
        return None
    report = run_prune(run.folder, options if budget is None else replace(options, max_size=size))
    if report.shortfall is not None:
        run.out.warning(report.shortfall.message, report.shortfall.hint, even_quiet=True)
    if report.refusal is not report.shortfall:
        _warn_of(run, report.refusal)
    if report.exact_retained:
        run.out.warning(f"{report.exact_retained} chunks keep their exact records: their coarser ones are damaged", "")
    run.out.report(report.to_json(), human=lambda: _show_prune(run, report))
    return None if report.within_budget else EXIT_NO_SPACE


def _keep_budget(run: Run, budget: str, options: PruneOptions) -> int | None:
    from kvtool.core.upkeep.prune import budget_of, keep_budget

    if options.max_size is not None:
        raise UsageError("--budget and --max-size exclude each other", "--max-size is for this command only")
    size = budget_of(budget)
    if size is None and (options.max_age, options.unused, options.cold) != (None, None, None):
        raise UsageError("--budget none lifts the limit and prunes nothing", "give the other options without it")
    if not options.dry_run:
        keep_budget(run.folder, size, lock_wait=options.lock_wait)
    if size is None:
        would = "would have" if options.dry_run else "has"
        run.out.report({"budget": None}, human=lambda: run.out.print(f"the store {would} no size budget"))
    return size


def _show_prune(run: Run, report: PruneReport) -> None:
    steps = report.to_json()["steps"]
    rows = [(row["step"], row["chunks"], row["documents"], f"{row['bytes'] / 1e6:,.1f}") for row in steps]
    if rows:
        run.out.table(("step", "chunks", "documents", "MB"), rows)
    would = "would be " if report.dry_run else ""
    run.out.print(f"{sized(report.before)} before, {would}{sized(report.after)} after")


@store_app.command()
@takes(StoreOptions, LockOptions, examples=("store compact", "store compact --lock-wait 10m"))
def compact(run: Run) -> None:
    """Give unused space of the store back to the disk.

    Chunks that no document refers to are removed. The store can be read meanwhile.
    """
    from kvtool.core.upkeep.prune import compact as run_compact

    done = run_compact(run.folder, lock_wait=run.lock_wait)

    def show() -> None:
        run.out.print(
            f"{sized(done.before)} before, {sized(done.after)} after; {counted(done.chunks, 'chunk')} that nothing "
            f"referred to and {counted(done.profiles, 'old profile')} dropped"
        )

    run.out.report(done.to_json(), human=show)


@dataclass(frozen=True, kw_only=True)
class PinOptions(Options, settings=False, group=WHICH):
    remove: bool = option(False, "Let `store prune` remove these again.")


@store_app.command()
@takes(PinOptions, StoreOptions, LockOptions, examples=("store pin handbook.md", 'store pin --remove "drafts/*.md"'))
def pin(run: Run, targets: Pinned = None) -> None:
    """Protect documents from `store prune`, or list the protected ones."""
    from kvtool.core.upkeep import forget

    remove = run.get(PinOptions).remove
    if targets:
        change = forget.unpin if remove else forget.pin
        pins = change(run.folder, targets, lock_wait=run.lock_wait)
    elif remove:
        raise UsageError("--remove needs a document", "`kvtool store pin` lists what is pinned")
    else:
        with run.open_store() as store:
            pins = store.pins()

    def show() -> None:
        for name in pins if run.out.verbosity >= 0 else ():
            run.out.print(name.replace("\n", "\\n"))
        if not pins:
            run.out.status("nothing is pinned")

    run.out.result({"sources": pins}, human=show)


for _command in (push, pull, export):
    store_app.command()(_command)
store_app.command("import")(import_)
