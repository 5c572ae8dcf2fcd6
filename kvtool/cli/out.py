"""The one place that writes: data to stdout, words to stderr, in human, JSON or event form.

Nothing here can crash a command because of what a text holds or what a terminal shows: control characters are
stripped, what the encoding lacks is replaced, a closed pipe ends the process quietly.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Literal

from kvtool.cli.progress import (
    EVENT_EVERY_S,
    LOG_EVERY_S,
    VERBOSE_EVERY_S,
    Bar,
    Log,
    Screen,
    can_draw,
    hide_activity,
    running,
    show_activity,
    showing,
)
from kvtool.cli.terminal import (
    SafeStream,
    WordWrap,
    clean,
    degrade,
    one_line,
    render_markdown,
    render_quote,
    render_table,
    silence,
    wrapped,
)
from kvtool.core.common.text import escaped
from kvtool.core.common.types import Events
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import EXIT_DONE, KvtoolError

Mode = Literal["human", "json", "jsonl"]
_VERBOSE = re.compile("-v+|--verbose")
SCHEMA = 1  # of every JSON object
_COLOURS = {"warning": 33, "failed": 31, "error": 31, "hint": 36}  # of a line's label


class OutputClosed(SystemExit):
    """The reader of our stdout has exited (`kvtool store ls | head`): nobody reads further output."""

    def __init__(self) -> None:
        super().__init__(EXIT_DONE)


class Out:
    """All output of a command. `verbosity`: -1 errors only, 0 as usual, 1 and more for details."""

    def __init__(
        self, mode: Mode = "human", verbosity: int = 0, stdout: IO[str] | None = None, stderr: IO[str] | None = None
    ) -> None:
        self.mode: Mode = mode
        self.verbosity = verbosity
        self._stdout = SafeStream(sys.stdout if stdout is None else stdout)
        self._stderr = SafeStream(sys.stderr if stderr is None else stderr)
        self._in_line = False  # whether stdout is in the middle of a line
        self._wrap = WordWrap()  # of an answer that streams to a terminal

    @classmethod
    def asked(cls, args: Sequence[str]) -> Out:
        """Return the output that the arguments ask for, without a parser: for errors before or during parsing."""
        flags = args[: args.index("--")] if "--" in args else args
        mode: Mode = "jsonl" if "--jsonl" in flags else "json" if "--json" in flags else "human"
        return cls(mode, -1 if {"-q", "--quiet"} & set(flags) else int(any(map(_VERBOSE.fullmatch, flags))))

    @property
    def human(self) -> bool:
        return self.mode == "human"

    @property
    def on_terminal(self) -> bool:
        return self.human and self._stdout.isatty()

    @property
    def is_interactive(self) -> bool:
        return self.human and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))

    # stdout

    def print(self, text: str = "", end: str = "\n") -> None:
        """Put text for a person on stdout at once; nothing in the machine modes. An answer streams through here, its
        pieces with an empty `end`: on a terminal its lines break between words."""
        if not end and self.on_terminal:
            text = clean(text)
            self._write(self._wrap.take(text, self._columns))
            self._in_line = not text.endswith("\n") if text else self._in_line
        elif self.human:
            self._put(clean(text) + end)

    def prose(self, text: str) -> None:
        self.print(wrapped(clean(text), self._stdout.columns))

    def end_line(self) -> None:
        if self._in_line:
            self.print()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        if self.human:
            self._put(render_table(columns, [list(row) for row in rows], title, self._stdout))

    def markdown(self, text: str) -> None:
        if self.human:
            self._put(render_markdown(text) if self._stdout.isatty() else text.rstrip("\n") + "\n")

    def json(self, value: Mapping[str, Any]) -> None:
        self._put(to_json({"schema": SCHEMA} | plain(value), encoding=self._stdout.encoding) + "\n")

    def result(self, value: Any, human: Callable[[], None]) -> None:
        """End a command: its result as JSON, as the `summary` event, or as `human` draws it."""
        if self.mode == "human":
            human()
        elif self.mode == "json":
            self.json(plain(value))
        else:
            self.event("summary", **plain(value))

    def report(self, value: Any, human: Callable[[], None]) -> None:
        """End a command whose result reports work and is no data: --quiet hides it."""
        if self.mode != "human" or self.verbosity >= 0:
            self.result(value, human)

    def event(self, type: Literal["status", "warning", "error", "summary"], **facts: Any) -> None:
        if self.mode == "jsonl":
            self.json({"type": type} | facts)

    # stderr

    def status(self, text: str, **facts: Any) -> None:
        text = scrubbed(text)
        self.event("status", message=text, **facts)
        if self.verbosity >= 0 and self.mode != "jsonl":
            self._say(text)

    def doing(self, text: str) -> None:
        """Show the present activity: next to the spinner or the bar on a terminal, and as a line with -v."""
        self.detail(text)
        show_activity(scrubbed(text))

    def idle(self) -> None:
        with hide_activity(until_new_words=True):
            pass

    def spinning(self, words: str) -> AbstractContextManager[None]:
        """Show a spinner on a terminal while the block runs; nothing with --quiet."""
        if self.verbosity < 0 or not can_draw(self._stderr):
            return nullcontext()
        return showing(Screen(self._stderr), words)

    def detail(self, text: str) -> None:
        if self.verbosity >= 1:
            self.status(text)

    def passage(self, pieces: Iterable[tuple[str, int]]) -> None:
        """Show a foreign text on stderr, each line after a bar, some of it in a colour (0: none); in square brackets
        where there are no colours."""
        if self.mode == "jsonl" or self.verbosity < 0:
            return
        text = render_quote((self._marked(*piece) for piece in pieces), self._stderr.columns)
        with suppress(OSError, ValueError), hide_activity():
            self._stderr.write(text)
            self._stderr.flush()

    def quote(self, text: str) -> None:
        if self.human:
            self._put(render_quote([(text, "{}")], self._stdout.columns))

    def warning(self, text: str, hint: str = "", *, even_quiet: bool = False, **facts: Any) -> None:
        """Warn the user while the work continues; with --quiet too where the exit code says so."""
        text, hint = scrubbed(text), scrubbed(hint)
        self.event("warning", message=text, hint=hint, **facts)
        if self.verbosity >= 0 or even_quiet:
            self._say(text, "warning", hint)

    def failed(self, what: str, reason: str) -> None:
        """Say which part of the work failed while the rest continues; with --quiet too."""
        self.event("warning", message=f"failed: {what}: {reason}", path=what, error=reason)
        self._say(one_line(f"{what}: {reason}"), "failed")

    def error(self, error: KvtoolError, exit_code: int | None = None) -> None:
        facts = error_json(error, exit_code)
        self._say(facts["message"], "error", facts["hint"])
        with suppress(KvtoolError, OutputClosed):  # stderr has it, and the exit code stays that of the error
            if self.mode == "json":
                self.json({"error": facts})
            self.event("error", error=facts)

    def progress(self, label: str, total: float | None = None, unit: str = "tokens") -> AbstractContextManager[Bar]:
        """A bar on a terminal, else a line every half minute, every ten seconds at -v, a status event each second in
        the jsonl mode."""
        return (running() or self._log()).bar(one_line(label), total, unit)

    def _log(self) -> Log:
        if self.mode == "jsonl":
            return Log(lambda text, facts: self.status(text, **facts), EVENT_EVERY_S)
        return Log(lambda text, facts: self.status(text), VERBOSE_EVERY_S if self.verbosity >= 1 else LOG_EVERY_S)

    @contextmanager
    def job(self) -> Iterator[Events]:
        """Show the events of a job: a bar for each step, from when its length is known, warnings, files by name."""
        bar: Bar | None = None  # that of the present step
        with ExitStack() as step_over:

            def step(label: str, total: int, unit: str) -> None:
                nonlocal bar
                step_over.close()
                bar = step_over.enter_context(self.progress(label, total, unit))

            def advance(count: float) -> None:
                if bar is not None:
                    bar.advance(count)

            def say(text: str, hint: str) -> None:
                for line in filter(None, (text, hint)):
                    self.status(line)

            yield Events(
                step=step,
                advance=advance,
                status=self.status if self.mode == "jsonl" else self.doing,
                say=say,
                warn=self.warning,
                failed=self.failed,
                skipped=lambda path, reason: self.detail(one_line(f"skipped {path}: {reason}")),
            )

    def flush(self) -> None:
        self._put("")

    # below

    @property
    def _columns(self) -> int:
        return max(1, self._stdout.columns or 1)

    def _put(self, text: str) -> None:
        held, self._wrap = self._wrap.rest(self._columns), WordWrap()
        self._write(held + text)

    def _write(self, text: str) -> None:
        is_shown = self._stdout.isatty() or not self._stderr.isatty()  # what is being done, by its result
        try:
            with hide_activity(until_new_words=True) if text and is_shown else nullcontext():
                self._stdout.write(text)
                self._stdout.flush()
            self._in_line = not text.endswith("\n") if text else self._in_line
        except (OSError, ValueError) as error:
            self._give_up_stdout(error)

    def _give_up_stdout(self, error: OSError | ValueError) -> None:
        silence(self._stdout.stream)
        self._stdout.stream = None  # an error object must not fail in the same way
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EINVAL):
            reason = error.strerror or str(error)
            raise KvtoolError(f"cannot write to standard output: {reason}", "free some space, or redirect elsewhere")
        raise OutputClosed from None

    def _say(self, text: str, label: str = "", hint: str = "") -> None:
        if self._in_line and self._stdout.is_beside(self._stderr):
            self.end_line()  # on one screen, or in one file, not after half an answer
        text = clean(f"{label}: {text}" if label else text)
        if label != "hint" and (columns := self._stderr.columns):  # a hint's command is copied in one piece
            text = wrapped(text, max(1, columns - 2))
        text = text.replace("\n", "\n  ")  # a file's name may hold a line of its own
        if label and not self._isplain():
            text = f"\x1b[1;{_COLOURS[label]}m{label}\x1b[0m{text.removeprefix(label)}"
        with suppress(OSError, ValueError), hide_activity():  # if stderr is closed, too, no warning can be shown
            self._stderr.write(text + "\n")
            self._stderr.flush()
        if hint:
            self._say(hint, "hint")

    def _marked(self, text: str, colour: int) -> tuple[str, str]:
        if colour and self._isplain():
            return f"[{text}]", "{}"
        return text, f"\x1b[1;{colour}m{{}}\x1b[0m" if colour else "{}"

    def _isplain(self) -> bool:
        return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not self._stderr.isatty()


# ---- JSON (`kvtool help json`) ----


def to_json(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """JSON that any parser takes and no terminal obeys: no NaN, and escapes also where the stream's encoding needs
    them."""
    known = plain(value)
    text = escaped(json.dumps(known, ensure_ascii=False, allow_nan=False, indent=indent))
    return text if degrade(text, encoding) == text else escaped(json.dumps(known, allow_nan=False, indent=indent))


def error_json(error: KvtoolError, exit_code: int | None = None) -> dict[str, Any]:
    code = error.exit_code if exit_code is None else exit_code
    return {"message": scrubbed(error.message), "hint": scrubbed(error.hint), "exit_code": code}


def plain(value: Any) -> Any:
    """Dataclasses, mappings, tuples, paths and numpy scalars as what `json` knows; a number that is none as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} cannot be put as JSON")
