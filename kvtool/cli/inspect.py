"""`kvtool inspect`: look into the store and the model that uses it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli.inspect_codec import codec
from kvtool.cli.inspect_defer import calibrate
from kvtool.cli.inspect_quality import MAX_TOKENS, Wanted, quality
from kvtool.cli.inspect_subject import Subject
from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.out import size as sized
from kvtool.cli.parsing import ManyValues
from kvtool.cli.sessions import open_any_store
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import EXIT_MISFIT, KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions

app = new_app()

REPORTS = ("deviation", "sparsity", "plan", "chunk")
WHATS = ("gate", "codec", "quality", *REPORTS)
Report = Callable[[Run, Any, Subject], int | None]


@app.command(cls=ManyValues)
@takes(
    QueryOptions.some("top_k", "level", "max_loss", "ratio", "link_tokens", "order", "defer_first"),
    ModelOptions,
    StoreOptions,
)
def inspect(
    run: Run,
    what: Annotated[
        str,
        typer.Argument(
            metavar="[gate|codec|quality|deviation|sparsity|plan|chunk]",
            help="`gate`: the laws on this model. `codec`: what its levels lose. `quality`: modes beside `full`. "
            "`deviation`: reused KV beside full prefill's. `sparsity`: where attention goes. `plan`: what of a "
            "question's prompt is cached; loads no model. `chunk`: one chunk of the store.",
        ),
    ] = "",
    about: Annotated[
        str | None, typer.Argument(metavar="[QUESTION|ID]", help="A question, or a chunk's id.", show_default=False)
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option("--batch", metavar="FILE.jsonl", help="A file of questions.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Only the first N of them.", show_default=False),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", metavar="NAME", help="codec: 1, mean-1, anchor-1, int8 …", show_default=False),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option("--runs", metavar="a,b:AMOUNT,c", help="quality: reuse, epic:16, union:5% …", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="quality: longest answer in tokens.")
    ] = MAX_TOKENS,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="FILE.jsonl", help="quality: keep results here and go on from them.", show_default=False
        ),
    ] = None,
    defer: Annotated[
        bool, typer.Option("--defer", help="quality: calibrate deferred loading. plan: what it loads first.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="quality: measure although the gate refuses.")] = False,
    chunks: Annotated[
        list[str] | None, typer.Option("--chunks", metavar="ID", help="Of a question: these chunks, in this order.")
    ] = None,
    documents: Annotated[
        list[str] | None, typer.Option("--documents", metavar="PATH", help="Of a question: all chunks of these.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots, too.", show_default=False),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FOLDER", help="Write the plots as SVG files.", show_default=False),
    ] = None,
) -> int | None:
    """The store at a glance, or one thing about it in depth."""
    if what and what not in WHATS:
        raise UsageError(f"inspect: there is no {what!r}", f"known: {', '.join(WHATS)}")
    subject = Subject(about, tuple(chunks or ()), tuple(documents or ()), batch, limit, html, figures, defer)
    subject.check()
    with open_any_store(run) as store:
        if what == "gate":
            return _gate(run, store, subject)
        if what == "codec":
            codec(run, store, subject, scheme or [])
            return None
        if what in REPORTS:
            return _report(what)(run, store, subject)
        if what == "quality":
            wanted = Wanted(subject, runs or (), max_tokens, resume, force)
            return calibrate(run, store, wanted) if defer else quality(run, store, wanted)
        _glance(run, store, subject)
        return None


def _report(what: str) -> Report:
    """A report in a module of its own, imported when it is asked for: `inspect_WHAT.WHAT`."""
    found: Report = getattr(importlib.import_module(f"kvtool.cli.inspect_{what}"), what)
    return found


def _glance(run: Run, store: Any, about: Subject) -> None:
    from kvtool.core.session.gate import stored_verdict
    from kvtool.core.session.identity import store_identity
    from kvtool.core.session.levels import MeasuredLosses
    from kvtool.lab.measure.beginning import beginning_of

    identity = store_identity(store)
    verdict = stored_verdict(store, identity.fingerprint)
    sizes, losses, served = store.stats(), MeasuredLosses(store).at_most(), store.served()
    lost = {level: {"kl_answer": loss} for level, loss in losses.items()}
    levels = level_rows({level: row | lost.get(level, {}) for level, row in sizes["levels"].items()})
    value = {"path": str(store.path), **sizes, "levels": levels}
    value |= {
        "model": identity.model,
        "dtype": identity.dtype,
        "fingerprint": identity.fingerprint,
        "lead_in": identity.lead_in.mode,
        "lead_in_tokens": len(identity.lead_in.ids),
        "gate": None if verdict is None else verdict.to_json(),
        "beginning": beginning_of(store, identity),
        "served": asdict(served) | {"hit_rate": served.hit_rate},
    }

    if about.wanted:
        _glance_page(run, about, value)

    def show() -> None:
        beginning: Any = value["beginning"]
        gate = "not run yet" if verdict is None else "passed" if verdict.passed else "FAILED"
        run.out.print(f"store    {value['path']}")
        run.out.print(f"model    {identity.model} in {identity.dtype}; gate {gate}")
        run.out.print(f"lead-in  {identity.lead_in.mode}, {len(identity.lead_in.ids)} tokens")
        apart = {name: beginning[name] if beginning else 0 for name in ("chunks", "tokens")}
        chunks, tokens = (sizes[name] - apart[name] for name in apart)
        run.out.print(f"content  {sizes['documents']} documents, {chunks} chunks; KV of {tokens:,} tokens")
        if beginning:
            run.out.print(f"start    the prompt's own beginning: {beginning['tokens']} tokens, one chunk more")
        of_beginning = {row["level"] for row in beginning["levels"]} if beginning else set()
        for row in levels:
            lost = f", {row['kl_answer']:.4f} nats a token lost at most" if "kl_answer" in row else ""
            first = row["level"] in of_beginning
            what = f"{row['chunks'] - first} chunks{' and the beginning' if first else ''}"
            run.out.print(f"level    {row['level']}: {what}, {row['bytes'] / 1e6:,.1f} MB{lost}")
        if served.hit_rate is not None:
            run.out.print(
                f"served   {served.questions} questions; {served.hit_rate:.1%} of {served.hits + served.misses} chunks "
                "were found"
            )
        of = "" if sizes["budget"] is None else f" of a budget of {sized(sizes['budget'])}"
        run.out.print(f"disk     {sized(sizes['folder_bytes'])} used{of}; {sized(sizes['disk_free'])} free")

    run.out.result(value, human=show)


def _glance_page(run: Run, about: Subject, value: dict[str, Any]) -> None:
    from kvtool.lab.charts.page import Section, Table

    levels = [
        (row["level"], row["chunks"], row["tokens"], row["bytes"], row.get("kl_answer", "")) for row in value["levels"]
    ]
    columns = ("level", "chunks", "tokens", "bytes", "nats a token lost at most")
    sections = [
        Section("Levels", tables=(Table(columns, tuple(levels)),)),
        Section("Served", tables=(Table(tuple(value["served"]), (tuple(value["served"].values()),)),)),
    ]
    names = ("path", "model", "dtype", "fingerprint", "files", "documents", "chunks", "tokens", "records", "bytes")
    facts = {name: value[name] for name in (*names, "folder_bytes", "budget", "disk_free")}
    about.write_page(run, "Store", facts, sections)


def _gate(run: Run, store: Any, about: Subject) -> int | None:
    from kvtool.core.session.gate import stored_verdict
    from kvtool.core.session.identity import store_identity

    identity = store_identity(store)
    verdict = stored_verdict(store, identity.fingerprint)
    if verdict is None:
        raise KvtoolError("the gate has not met this model yet", "it runs at the first ingest or query")
    rows = [
        (f"law {c.law}", c.name, f"{c.difference:.3g}", f"{c.allowed:.3g}", "passed" if c.passed else "FAILED")
        for c in verdict.checks
    ]
    columns = ("law", "check", "difference", "allowed", "")
    if about.wanted:
        from kvtool.lab.charts.page import Section, Table

        section = Section("The laws on this model", tables=(Table(columns, tuple(rows)),))
        about.write_page(run, "Gate", {"model": identity.model, "passed": verdict.passed}, [section])
    run.out.result(verdict.to_json(), human=lambda: run.out.table(columns, rows))
    return None if verdict.passed else EXIT_MISFIT
