"""Answers of another process: a running `kvtool serve`, or an engine that stays loaded."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtool.cli.answers import end_answer, show_numbers, show_sources
from kvtool.cli.options import Run
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.files import cache_dir, new_file
from kvtool.core.common.sizes import counted
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.serve.kept_engine import code_stamp, kept_engine, start_engine
from kvtool.serve.options import KeepOptions, ServeOptions
from kvtool.serve.unix_socket import Declined, ask, connect, placed, socket_path

_MODEL = ("model", "device", "dtype")


def answered_beside(run: Run, request: Request) -> bool:
    """Have a question answered by another process of this store and user; False: none does. Raises as the question
    would."""
    place, options = run.get(StoreOptions).place, run.get(QueryOptions)
    if not isinstance(place, Path) or _is_looked_into(options):
        return False
    keep_alive = _seconds_to_keep(run)
    if (connected := _connected(run, place, request, keep_alive)) is None:
        return False
    run.out.doing("answering")
    try:
        for event in ask(connected, _question(run, request, options), keep_alive):
            if isinstance(event, str):
                if options.is_streamed(run.out.on_terminal):
                    run.out.print(event, end="")
            else:
                _show(run, event)
    except Declined as declined:
        _say_why_not(run, f"the server of this store was not used: {declined.why}")
        return False
    if keep_alive and not is_kept_asked(run):
        _tell_of_keeping(run, place, keep_alive)
    return True


def _is_looked_into(options: QueryOptions) -> bool:
    return options.explain or options.token_ids or options.audit > 0


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


def _show(run: Run, answer: Mapping[str, Any]) -> None:
    for text, hint in answer["warnings"]:
        run.out.warning(text, hint)
    facts = answer["facts"]
    run.out.result(facts, human=lambda: end_answer(run.out, facts))
    show_numbers(run.out, facts, answer["steps"], answer["stepper"])
    show_sources(run.out, [ReplyChunk(**chunk) for chunk in facts["chunks"]])


# ---- an engine that stays ----


def is_kept_asked(run: Run) -> bool:
    return run.resolved.origin("keep_alive").layer == "flag" and run.get(KeepOptions).keep_alive > 0


def check_kept(run: Run, is_plain: bool) -> None:
    """Refuse a `--keep-alive` that would do nothing. `is_plain`: one question that another process may answer."""
    if not is_kept_asked(run):
        return
    if not isinstance(run.get(StoreOptions).place, Path):
        raise UsageError("--keep-alive is for a store on this machine", "pull the shared store first")
    if not is_plain or _is_looked_into(run.get(QueryOptions)):
        raise UsageError(
            "--keep-alive is for one question that the engine answers itself",
            "leave out --batch, --compare, --explain, --audit and --token-ids, unset KVTOOL_TIMELINE and KVTOOL_SERVER",
        )


def _seconds_to_keep(run: Run) -> float:
    """How long an engine stays. By default only a person at a terminal gets one: pipes and cron start no process."""
    is_person = run.out.is_interactive and sys.stderr is not None and sys.stderr.isatty()
    return run.get(KeepOptions).keep_alive if is_kept_asked(run) or is_person else 0.0


def _connected(run: Run, place: Path, request: Request, keep_alive: float) -> socket.socket | None:
    """Connect to a server of the store, or start its engine if that is to stay; None: this process has to answer."""
    engine = kept_engine(place)
    is_outdated = engine is not None and engine.code != code_stamp()
    connected = None if is_outdated else connect(socket_path(place))
    if connected is not None or not keep_alive:
        return connected
    from kvtool.core.cache.store import Store  # here: most questions start no engine
    from kvtool.core.query.retrieve import find_chunks
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.identity import model_files, store_identity

    model, asking = run.get(ModelOptions), run.get(QueryOptions)
    with Store.open(place) as store:  # errors are found before a model is loaded, and a download shows its progress
        find_chunks(Finder(store), request, asking)
        asking.check_of(store_identity(store))
        model_files(store_identity(store), model, store.made_by())
    run.out.doing("loading the model")
    options = {
        "model": asdict(model) | {"model": placed(model.model)},
        "memory_cache": run.get(ServeOptions).memory_cache,
        "keep_alive": keep_alive,
    }
    try:
        if engine is not None and is_outdated:
            engine.end()
        return start_engine(place, options)
    except (OSError, subprocess.SubprocessError, KvtoolError) as error:
        _say_why_not(run, f"no model stays loaded: {error}")
        return None


def _say_why_not(run: Run, text: str) -> None:
    (run.out.status if is_kept_asked(run) else run.out.detail)(text)


def _tell_of_keeping(run: Run, place: Path, keep_alive: float) -> None:
    if run.out.verbosity < 0 or kept_engine(place) is None:
        return
    with suppress(OSError):  # it is there: it was said
        new_file(cache_dir() / "engines" / "told").close()
        named = f" --store {shlex.quote(str(place))}" if run.resolved.origin("store").layer == "flag" else ""
        run.out.status(
            f"the model stays loaded for {counted(max(1, round(keep_alive / 60)), 'minute')}: "
            f"`kvtool stop{named}` unloads it, `--keep-alive 0` turns this off"
        )
