"""A question of the shell to the server of the same store, whose model is loaded already; no torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.cli.answered import show_numbers
from kvtool.cli.options import Run
from kvtool.cli.sources import show_sources
from kvtool.core.cache.options import StoreOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.serve.beside import connect, socket_path
from kvtool.serve.client import Declined, ask, placed

_MODEL = ("model", "device", "dtype")


def answered_beside(run: Run, request: Request, passages: bool = False) -> bool:
    """Have a question answered by a running `kvtool serve` of this store and user; False: none does.

    Raises
    ------
    KvtoolError : as the question would have raised it here.
    """
    place, options = run.get(StoreOptions).place, run.get(QueryOptions)
    looked_into = options.explain or options.token_ids or options.audit > 0  # what only the asking process shows
    if not isinstance(place, Path) or looked_into:
        return False
    connected = connect(socket_path(place))
    if connected is None:
        return False
    run.out.doing("answering")
    try:
        for event in ask(connected, _question(run, request, options)):
            if isinstance(event, str):
                run.out.print(event, end="")
            else:
                _show(run, event, passages)
    except Declined as declined:
        run.out.detail(f"the server of this store was not used: {declined.why}")
        return False
    return True


def _question(run: Run, request: Request, options: QueryOptions) -> dict[str, Any]:
    model = run.get(ModelOptions)
    named = {name: getattr(options, name) for name in options_of(QueryOptions)}
    return {
        "question": request.question,
        "chunks": request.chunks,
        "documents": request.documents,
        "folder": os.getcwd(),
        "options": named | {"embedder": placed(options.embedder)},
        "model": {name: getattr(model, name) for name in _MODEL} | {"model": placed(model.model)},
    }


def _show(run: Run, answer: Mapping[str, Any], passages: bool) -> None:
    for text, hint in answer["warnings"]:
        run.out.warning(text, hint)
    facts = answer["facts"]
    run.out.result(facts, human=run.out.end_line if answer["text"] else run.out.print)
    show_numbers(run.out, facts, answer["steps"], answer["stepper"])
    show_sources(run.out, [ReplyChunk(**chunk) for chunk in facts["chunks"]], passages)
