"""`kvtool serve`: a resident engine with an OpenAI-compatible API."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from kvtool.cli.keep_alive import engine_of, missing_package
from kvtool.cli.options import Run, takes
from kvtool.cli.out import Out, OutputClosed
from kvtool.cli.terminal import one_line
from kvtool.core.agent.options import read_keys
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.text import escaped
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, StoreNotFoundError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.serve.options import ACCESS, ServeOptions
from kvtool.serve.unix_socket import listen, socket_path

if TYPE_CHECKING:
    from kvtool.serve.engine import Engine
    from kvtool.serve.metrics import Log
    from kvtool.serve.server import Listener


@dataclass(frozen=True, kw_only=True)
class ServeFlags(Options, settings=False):
    show_key: bool = option(False, "Print the first API key, and exit.", group=ACCESS)


@takes(
    ServeOptions,
    ServeFlags,
    QueryOptions.some("fusion", "ratio", "top_k", "level", "set", "max_tokens", "system"),
    StoreOptions,
    ModelOptions,
    LockOptions,
    examples=("serve", "serve --port 8000 --cors-origin http://localhost:3000", "serve --show-key"),
    common="host port key_file show_key cors_origin uploads learn parallel fusion top_k max_tokens store model",
)
def serve(run: Run) -> None:
    """Answer over HTTP with an OpenAI-compatible API."""
    options = run.get(ServeOptions)
    file = options.key_path
    if run.get(ServeFlags).show_key:
        key = read_keys(file)[0]
        run.out.result({"key": key, "path": str(file)}, human=lambda: run.out.print(key))
        return
    if (missing := missing_package()) is not None:
        raise KvtoolError(f"`kvtool serve` needs the package {missing}", extra_line("serve"))
    _serve(run, options, read_keys(file) if options.key else None, file)


def _serve(run: Run, options: ServeOptions, keys: Sequence[str] | None, file: Path) -> None:
    from kvtool.serve.app import make_app
    from kvtool.serve.auth import owners_of
    from kvtool.serve.engine import Engine
    from kvtool.serve.server import Listener, address_of, bind
    from kvtool.serve.server import serve as run_server

    warn = warning_to(run.out)
    if options.uploads is not None and options.uploads.exists() and not options.uploads.is_dir():
        raise UsageError(f"--uploads: {options.uploads} is not a folder", "name a folder; a missing one is made")
    _check_store(run, options)
    with bind(options) as bound:
        engine = Engine(run.get(StoreOptions).place, run.get(ModelOptions), warn, options, owners_of(keys))
        log = _Log(run, options.request_log)
        app = make_app(engine, options, run.get(QueryOptions), _ingesting(run), keys, log.write)
        local = _local(run, engine, log.write, options)
        listeners = [Listener(app, bound, timeout=options.client_timeout), *local]
        address = address_of(bound)
        run.out.doing("loading the model")
        try:
            engine.start()
            said = partial(_say, run, options, address, file, keys)
            run_server(engine, listeners, options.drain_timeout, said, warn)
        finally:
            for listener in listeners:
                listener.close()
            engine.close()
            log.close()


def _check_store(run: Run, options: ServeOptions) -> None:
    """Make a missing store where clients may ingest or are learned from. Raises StoreNotFoundError or ModelError."""
    from kvtool.core.cache.layout import read_uuid

    place = run.get(StoreOptions).place
    if isinstance(place, str):
        return  # the engine opens a shared store
    try:
        read_uuid(place)
    except StoreNotFoundError:
        if not (options.learn or options.uploads):
            raise
        from kvtool.core.ingest.job import create

        create(place, _ingesting(run))
        run.out.status(f"made an empty store at {place}")


def warning_to(out: Out) -> Warn:
    """Return a function that warns on `out`: a closed output must not end the thread that answers."""

    def warn(text: str, hint: str) -> None:
        with suppress(OutputClosed, KvtoolError):
            out.warning(text, hint)

    return warn


def _local(run: Run, engine: Engine, log: Log, options: ServeOptions) -> list[Listener]:
    from kvtool.serve.app import local_app
    from kvtool.serve.server import Listener

    place = run.get(StoreOptions).place
    if not options.socket or not isinstance(place, Path):
        return []
    if (engine_record := engine_of(place)) is not None:
        engine_record.end()
    path = socket_path(place)
    try:
        bound = listen(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        run.out.warning(f"no socket for the shell at {path}: {why}", "--no-socket does without")
        return []
    if bound is None:
        run.out.warning("another server of this store answers the shell", "--no-socket does without")
        return []
    return [Listener(local_app(engine, log), bound, path=path)]


def _ingesting(run: Run) -> IngestOptions:
    model, options = run.get(ModelOptions), run.get(IngestOptions)
    # A server's own --system is said to the model; the store, which would be computed anew for it, keeps its own.
    system = None if run.resolved.origin("system").layer == "flag" else options.system
    return replace(options, model=model.model, device=model.device, dtype=model.dtype, system=system, log=None)


def _say(run: Run, options: ServeOptions, address: str, file: Path, keys: Sequence[str] | None) -> None:
    how, page = "no key is needed", address
    if keys is not None:
        how = f"the key is in {file} (`kvtool serve --show-key` prints it)"
        if sys.stderr.isatty():  # not in a log; browsers send nothing of what is after #
            page = f"{address}/#key={quote(keys[0])}"
    run.out.idle()
    run.out.status(f"ready on {address}; {how}; a browser shows a page at {page}", address=address)
    if not options.is_local:
        run.out.warning(
            "the key, the questions and the answers go over the network unencrypted",
            "put a proxy with https in front of the server",
        )


class _Log:
    """A line for each request, in a file or on stdout, there a short one for a person; nothing with --quiet."""

    def __init__(self, run: Run, path: Path | None) -> None:
        self._out, self._file = run.out, None if path is None else _appended(path)

    def write(self, row: dict[str, Any]) -> None:
        """Write a line. A full disk, or a pipe that nobody reads, keeps no question from its answer."""
        with suppress(OSError, OutputClosed, KvtoolError):
            if self._file is not None:
                self._file.write(escaped(json.dumps(row, ensure_ascii=False)) + "\n")
                self._file.flush()
            elif self._out.on_terminal:
                self._out.print(_in_short(row))
            elif self._out.verbosity >= 0:
                self._out.json(row)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _in_short(row: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(row["time"]))
    facts = [f"{at} {row['method']} {one_line(row['path'])} {row['status']} in {row['milliseconds'] / 1e3:.2f} s"]
    if "tokens" in row:
        facts.append(f"{row['tokens']['prompt']:,} + {row['tokens']['generated']:,} tokens")
    return ", ".join([*facts, *([one_line(row["error"])] if "error" in row else [])])


def _appended(path: Path) -> IO[str]:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return open(handle, "a", encoding="utf-8")
