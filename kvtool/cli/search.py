"""`kvtool search`: the passages that a question would be answered from, without a model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.answers import cited, show_corrections
from kvtool.cli.commands import new_app
from kvtool.cli.options import ManyValues, Run, open_any_store, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import RemoteOptions

app = new_app()
_SHOWN = 240  # characters of a passage in a terminal


@app.command(cls=ManyValues)
@takes(
    QueryOptions.some("top_k", "source", "retriever", "embedder", "offline", "set"),
    StoreOptions,
    RemoteOptions,
    LockOptions,
    examples=("search founded observatory", "search opening hours --top-k 20 --set search.min_score=0"),
)
def search(
    run: Run, words: Annotated[list[str], typer.Argument(help="What to find.", metavar="WORDS...", show_default=False)]
) -> None:
    """Show the passages that match a question, best first. No language model is needed."""
    from kvtool.core.query.retrieve import search
    from kvtool.core.retrieval.finder import Finder

    with open_any_store(run) as store:
        report = search(store, Finder(store, run.out.warning), " ".join(words), run.get(QueryOptions))

    def show() -> None:
        for chunk in report.chunks:
            text = " ".join(chunk.text.split())
            run.out.prose(f"{chunk.score:.2f}  {cited(chunk)}")
            run.out.prose(f"      {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}\n")

    show_corrections(run.out, report.corrections)
    run.out.result(report.to_json(), human=show)
    if report.chunks_omitted:
        more = counted(report.chunks_omitted, "passage")
        run.out.status(f"{more} more would help a question no further; --set search.min_score=0 shows all")
