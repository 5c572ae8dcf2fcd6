"""The command line's entry: finds the command, runs it, turns what it raises into words and an exit code.

A command is one line in `COMMANDS` and a function of its name in `kvtool/cli/<name>.py` (see `options.py`); a group
(`kvtool store`) is a `typer.Typer` called `<name>_app`. The module is imported only when its command is invoked or
completed; the overview and the completion of command names are drawn from `COMMANDS`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Annotated, Any, ClassVar, NoReturn

import typer
import typer.main

from kvtool.cli.commands import LazyGroup, build_command, everywhere, new_app, usage_error
from kvtool.cli.out import Out
from kvtool.core.common.collecting import kept_collection
from kvtool.core.common.machine import is_busy, is_out_of_memory
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    KvtoolError,
    NoSpaceError,
    UsageError,
)

SHOWN = {  # what the overview lists, by heading
    "Documents": {
        "ingest": "Read documents and store each passage's KV cache.",
        "watch": "Ingest files and folders again whenever they change.",
        "compress": "Make the stored KV caches several times smaller.",
    },
    "Questions": {
        "query": "Answer a question from the stored documents.",
        "chat": "Hold a conversation about the stored documents.",
        "search": "Show the passages that match a question; no model is needed.",
        "eval": "Measure retrieval and answers on your own questions.",
        "serve": "Answer over HTTP with an OpenAI-compatible API.",
        "mcp": "Offer the store to AI agents as tools (MCP).",
    },
    "The store (more: `kvtool store --help`)": {
        "store ls": "List documents, or their chunks.",
        "store verify": "Check stored data; with --repair, remove what is damaged.",
        "store rm": "Remove documents, and the chunks that only they use.",
        "store prune": "Shrink the store to a size: evict the least used KV first.",
        "store push": "Upload what a shared store (S3, Redis, a folder) lacks.",
        "store pull": "Download what this store lacks from a shared store.",
        "store export": "Write documents, chunks and their KV to one file, a pack.",
        "store import": "Add packs or other stores to this store.",
    },
    "Models that stay loaded": {
        "ps": "List loaded models with their memory use and expiry.",
        "stop": "Unload the model of a store, or all models.",
    },
    "This installation": {
        "inspect": "Show the store, a chunk, or a report such as `codec`.",
        "doctor": "Check that libraries, model, store and disk work.",
        "config": "Show the settings and where each value comes from.",
        "help": "Show a page of the documentation.",
    },
}
_STORE = {"store": "List, check, shrink, protect and share what is stored."}
COMMANDS = {name: line for rows in SHOWN.values() for name, line in rows.items() if " " not in name} | _STORE
_MODULES = {"watch": "ingest", "search": "query", "stop": "ps", "eval": "inspect"}  # of a command, if not of its name
_GROUPS = ("store", "inspect")  # whose commands are missed without the group's name
_COMPLETE = "_KVTOOL_COMPLETE"  # set by a shell's completion script
_OTHER_NAMES = {  # what other programs call them
    "list": "store ls",
    **dict.fromkeys(("add", "index"), "ingest"),
    **dict.fromkeys(("ask", "answer"), "query"),
    **dict.fromkeys(("remove", "delete"), "store rm"),
    "models": "help models",
    "version": "--version",
}
_SHORT_SPIN = "1000"  # iterations, some microseconds
RESUME = "what was committed stays; run the same command again to resume"
# Of commands that have nothing to resume.
_LEFT = {
    **dict.fromkeys(("mcp", "search", "ps", "config", "doctor", "help"), ""),
    **dict.fromkeys(("chat", "inspect"), "the store is unchanged"),
    "query": "the store is unchanged; ask again",
    "serve": "the store is unchanged; start it again",
    "eval": "the store is unchanged; what is measured with --resume FILE, or written by --make, is kept there",
    "watch": "what was committed stays; the next start ingests what changed meanwhile",
    "stop": "processes exit after their current answers",
}


class Root(LazyGroup):
    lines: ClassVar[Mapping[str, str]] = COMMANDS

    def load(self, name: str) -> Any:
        return load_command(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for rows in SHOWN.values() for name in rows)
        for heading, rows in SHOWN.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", line) for name, line in rows.items()])

    def format_end(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Options of every command"):
            formatter.write_dl(everywhere())
        formatter.write_paragraph()
        formatter.write_text("`kvtool COMMAND --help` shows the options of a command, `kvtool help` the documentation.")

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] not in COMMANDS:
            group = group_of(args[0])
            other = f"{group} {args[0]}" if group is not None else _OTHER_NAMES.get(args[0])
            if other is not None:
                raise UsageError(f"No such command '{args[0]}'.", f"it is `kvtool {other}`")
        return super().resolve_command(ctx, args)


def group_of(name: str) -> str | None:
    return next((each for each in _GROUPS if name in load_command(each).commands), None)


def load_command(name: str) -> Any:
    module = importlib.import_module(f"kvtool.cli.{_MODULES.get(name, name)}")
    return build_command(getattr(module, f"{name}_app", None) or getattr(module, name))


app = new_app(
    help="Answer questions from documents. A language model reads each passage once; its state, the KV cache, is "
    "stored and reused by every answer, so that answers start several times sooner.",
    add_completion=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvtool import __version__

        Out().print(f"kvtool {__version__}")
        raise typer.Exit


@app.callback(cls=Root, invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        sys.stderr.write(ctx.get_help() + "\n")
        raise typer.Exit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None, commands: typer.Typer = app, program: str = "kvtool") -> int:
    """Run kvtool; returns the exit code. `argv`: None for the process's own; `commands`, `program`: of another
    program."""
    with kept_collection():
        return _run(argv, commands, program)


def _run(argv: Sequence[str] | None, commands: typer.Typer = app, program: str = "kvtool") -> int:
    with suppress(Exception):  # a stderr that is no file
        faulthandler.enable()
    args = list(sys.argv[1:] if argv is None else argv)
    _share_cores()
    out = Out.asked(args)
    asked_by_shell = _COMPLETE in os.environ  # someone is typing there
    with _signals(), nullcontext() if asked_by_shell else out.spinning("starting"):
        try:
            return _guarded(args, out, lambda: _invoke(args, commands, program))
        except SystemExit as exit:  # a closed stdout, or a command's own
            return exit.code if isinstance(exit.code, int) else EXIT_DONE if exit.code is None else EXIT_FAILED


def _share_cores() -> None:
    """On a busy machine, let waiting threads sleep instead of spinning on another's core; before torch is imported.

    On 2 cores with one other process, `epic` took 0.74 s instead of 1.2 to 9.9 s; an idle machine loses a tenth by it.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys() and is_busy():
        os.environ["GOMP_SPINCOUNT"] = _SHORT_SPIN


def run() -> NoReturn:
    """Run kvtool as a process of its own, and end it at once: taking torch down takes a second, and nothing is left
    to be done: stores are closed and files are written where they are used.
    """
    code = _run(None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _guarded(args: list[str], out: Out, invoke: Callable[[], int]) -> int:
    try:
        code = invoke()
        out.flush()
        return code
    except BaseException as raised:
        shown = explain(raised, next((word for word in args if word in COMMANDS), ""))
        if shown is None:
            raise
        error, code = shown
        if os.environ.get("KVTOOL_DEBUG", "") not in ("", "0"):
            import traceback

            sys.stderr.write(scrubbed(traceback.format_exc()))
        out.error(error, code)
        return code


def _invoke(args: list[str], commands: typer.Typer, program: str) -> int:
    root = typer.main.get_command(commands)
    if _COMPLETE in os.environ:
        root.main(args, prog_name=program)
    try:
        with root.make_context(program, args) as context:
            result = root.invoke(context)
    except typer.Exit as exit:
        result = exit.exit_code
    return result if isinstance(result, int) else EXIT_DONE


def explain(raised: BaseException, command: str = "") -> tuple[KvtoolError, int] | None:
    """Return the error to show for an exception that ended a command, and the exit code; None: show nothing."""
    if isinstance(raised, KvtoolError):
        return raised, raised.exit_code
    if isinstance(raised, typer.TyperException):
        return usage_error(raised), raised.exit_code
    if isinstance(raised, KeyboardInterrupt | typer.Abort):
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write("\n")  # after the terminal's own ^C, which no wrapping of lines knows of
        return KvtoolError("interrupted", _LEFT.get(command, RESUME)), EXIT_INTERRUPTED
    if isinstance(raised, Terminated) or (isinstance(raised, SystemExit) and _SIGTERM_CAME.is_set()):
        return KvtoolError("terminated", _LEFT.get(command, RESUME)), EXIT_TERMINATED
    if isinstance(raised, SystemExit):
        return (KvtoolError(raised.code), EXIT_FAILED) if isinstance(raised.code, str) else None
    if is_out_of_memory(raised):
        return KvtoolError("out of memory", "use fewer or shorter chunks, a smaller model, or --dtype bfloat16"), 1
    if isinstance(raised, OSError) and (error := _of_the_system(raised)):
        return error, error.exit_code
    what = f"{type(raised).__name__}: {raised}".rstrip(": ")
    return KvtoolError(f"unexpected {what}", "this is a bug in kvtool; KVTOOL_DEBUG=1 shows the traceback"), EXIT_FAILED


def _of_the_system(error: OSError) -> KvtoolError | None:
    """A file that cannot be used, in words; None where the error names no file."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space where the output or the store is written, or write elsewhere"
        return NoSpaceError(f"no space left{_on(error)}", hint)
    if error.filename is None:
        return None
    what = (error.strerror or type(error).__name__).lower()
    return KvtoolError(f"{what}{_on(error)}", "check the path and its permissions")


def _on(error: OSError) -> str:
    return f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""


# Signals.


_SIGTERM_CAME = threading.Event()  # Ray, where it waits, makes a SystemExit of its own of whatever a signal raises


class Terminated(SystemExit):
    """SIGTERM, as an exception, so that every `finally` runs."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C kills at once
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    _SIGTERM_CAME.set()
    raise Terminated


@contextmanager
def _signals() -> Iterator[None]:
    """Our handlers for as long as a command runs; a signal that was ignored at the start (`nohup`, `&`) stays so."""
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        _SIGTERM_CAME.clear()
        for number, handler in ((signal.SIGINT, _interrupt), (signal.SIGTERM, _terminate)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
