"""Answers of another process: a running `kvtool serve`, or an engine that `--keep-alive` leaves loaded."""

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
from kvtool.core.common.files import cache_dir, make_folder, new_file
from kvtool.core.common.sizes import shown_size
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.serve.options import KeepOptions, ServeOptions
from kvtool.serve.unix_socket import Declined, ask, connect, placed, socket_path

_MODEL = ("model", "device", "dtype")
_SLOW = 2.0  # seconds of loading, after which `--keep-alive` is mentioned


def answered_beside(run: Run, request: Request) -> bool:
    """Have a question answered by another process of this store and user; False: none does.

    Raises
    ------
    KvtoolError : as the question would have raised it here.
    """
    place, options = run.get(StoreOptions).place, run.get(QueryOptions)
    if not isinstance(place, Path) or _is_looked_into(options):
        return False
    keep_alive = _keep_alive(run)
    connected, is_new = connect(socket_path(place)), False
    if connected is None and keep_alive:
        connected = _kept(run, place, keep_alive)
        is_new = connected is not None
    if connected is None:
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
        say = run.out.status if keep_alive else run.out.detail
        say(f"the server of this store was not used: {declined.why}")
        return False
    if is_new:
        _tell_of_new(run, place)
    return True


def _is_looked_into(options: QueryOptions) -> bool:
    """Return True if only the asking process shows what is wanted."""
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
    """Return True if `--keep-alive` itself is given, and not a setting."""
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


def _keep_alive(run: Run) -> float:
    """Return the seconds to keep an engine: a setting is for people, a flag is also for programs such as cron."""
    return run.get(KeepOptions).keep_alive if is_kept_asked(run) or _is_person_there() else 0.0


def _is_person_there() -> bool:
    return any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _kept(run: Run, place: Path, keep_alive: float) -> socket.socket | None:
    """Connect to the store's engine, started if necessary; None: there is none, and this process has to answer."""
    from kvtool.core.cache.layout import read_store_file  # here: most questions start no engine
    from kvtool.serve.kept_engine import joined

    read_store_file(place)  # what is missing or foreign is this question's error, not the engine's
    model = run.get(ModelOptions)
    run.out.doing("loading the model, which stays")
    options = {
        "model": asdict(model) | {"model": placed(model.model)},
        "memory_cache": run.get(ServeOptions).memory_cache,
        "keep_alive": keep_alive,
    }
    try:
        found = joined(place, options)
    except (OSError, subprocess.SubprocessError) as error:
        found = KvtoolError(str(error))
    if isinstance(found, KvtoolError):
        run.out.warning(f"no model stays loaded: {found.message}", found.hint)
        return None
    return found


def _tell_of_new(run: Run, place: Path) -> None:
    from kvtool.serve.kept_engine import kept_engines

    for engine in kept_engines():
        if engine.store == os.path.realpath(place):
            memory = f"{shown_size(engine.memory)}, " if engine.memory else ""
            named = f" --store {shlex.quote(str(place))}" if run.resolved.origin("store").layer == "flag" else ""
            run.out.status(f"the model stays loaded ({memory}process {engine.pid}); `kvtool stop{named}` ends it")


def tell_of_keeping(run: Run, seconds: float) -> None:
    """Mention `--keep-alive` once to a person who has waited for a model; never again with this home."""
    if seconds < _SLOW or not run.out.on_terminal or run.get(KeepOptions).keep_alive or run.out.verbosity < 0:
        return
    folder = cache_dir() / "engines"
    with suppress(OSError, KvtoolError):  # it is there: it was said
        make_folder(folder)
        new_file(folder / "told").close()
        run.out.status(
            f"the model took {seconds:.0f} s to load; `kvtool query --keep-alive 5m` keeps it for further questions"
        )
