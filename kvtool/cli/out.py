"""The one place that writes: data to stdout, words to stderr, in human, JSON or event form.

Nothing here can crash a command because of what a text holds or what a terminal shows: control characters are
stripped, what the encoding lacks is replaced, a closed pipe ends the process quietly.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, cast

from kvtool.core.common.json_text import escaped
from kvtool.core.common.urls import scrubbed
from kvtool.core.errors import EXIT_DONE, KvtoolError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SCHEMA = 2
STATUS_EVERY_S = 10.0  # a line at -v where no bar can be drawn
EVENT_EVERY_S = 1.0

Mode = Literal["human", "json", "jsonl"]


class OutputClosed(SystemExit):
    """Whoever read our stdout has gone (`kvtool store ls | head`): nothing is left to say to anybody."""

    def __init__(self) -> None:
        super().__init__(EXIT_DONE)


# Text that is safe to print.

_LOOKALIKES = str.maketrans(
    {"…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x", "→": "->", "≥": ">="}
    | {"≤": "<=", "±": "+-", "─": "-", "━": "-", "│": "|", "•": "*", "√": "v", "\xa0": " "}
)
# C0 but tab and newline, DEL, C1, and the marks that reorder what follows them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Foreign text without escape sequences' ESC, control characters and direction overrides."""
    return _UNSAFE.sub("", text)


def one_line(text: str) -> str:
    """`clean`, with every run of white space as one blank: a table's cell, a file name in a sentence."""
    return clean(" ".join(text.split()))


def counted(number: int, one: str, more: str = "") -> str:
    """A number of things: `1 document`, `2 documents`."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def degrade(text: str, encoding: str) -> str:
    """The text with what `encoding` cannot show put as look-alikes, else as `?`."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_LOOKALIKES).encode(encoding, errors="replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", errors="replace").decode("ascii")


def to_json(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """JSON that any parser takes and no terminal obeys: no NaN, and escapes also where the stream's encoding needs
    them."""
    plain = _plain(value)
    text = escaped(json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent))
    return text if degrade(text, encoding) == text else escaped(json.dumps(plain, allow_nan=False, indent=indent))


def error_json(error: KvtoolError, exit_code: int | None = None) -> dict[str, Any]:
    """An error as every object and event has it: `message`, `hint`, `exit_code`; without passwords of URLs."""
    code = error.exit_code if exit_code is None else exit_code
    return {"message": scrubbed(error.message), "hint": scrubbed(error.hint), "exit_code": code}


def _plain(value: Any) -> Any:
    """Dataclasses, mappings, tuples, paths and numpy scalars as what `json` knows; a number that is none as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if hasattr(value, "tolist"):  # numpy and torch
        return _plain(value.tolist())
    if isinstance(value, Iterable):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} cannot be put as JSON")


class _SafeStream(io.TextIOBase):
    """A text stream that takes any text; what `rich` draws on, too."""

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream  # None where the process was started without it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(ValueError, AttributeError):
            return self.stream is not None and self.stream.isatty()
        return False

    def write(self, text: str) -> int:
        if self.stream is not None:
            self.stream.write(degrade(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()


def silence(stream: IO[str] | None) -> None:
    """Send what is still buffered to nowhere, so that the interpreter's last flush cannot fail."""
    with suppress(Exception):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# Progress.


class Progress(Protocol):
    """A long job's progress; `out.progress()` yields one."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def describe(self, label: str) -> None:
        """It is on this now."""


_Say = Callable[[str, dict[str, Any]], None]  # a sentence, and the facts in it


class _Lines:
    """A status now and then, where no bar can be drawn; silent when `say` is None."""

    def __init__(self, say: _Say | None, label: str, total: float | None, unit: str, every: float) -> None:
        self._say, self._label, self._total, self._unit, self._every = say, label, total, unit, every
        self._done = 0.0
        self._start = self._last = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if self._say and now - self._last >= self._every:
            self._last = now
            speed = self._done / max(now - self._start, 1e-9)
            of = f"/{self._total:g}" if self._total else ""
            facts = {"done": self._done, "total": self._total, "unit": self._unit, "per_second": speed}
            self._say(f"{self._label}: {self._done:g}{of} {self._unit}, {speed:.1f} {self._unit}/s", facts)

    def describe(self, label: str) -> None:
        self._label = one_line(label)


class _Bar:
    """A bar with speed and ETA, drawn by rich."""

    def __init__(self, bars: RichProgress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._task, amount)

    def describe(self, label: str) -> None:
        self._bars.update(self._task, description=one_line(label))


def _rich_bars(stream: _SafeStream, unit: str) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed or 0:,.0f} {unit}/s")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), SpeedColumn())
    console = Console(file=cast(IO[str], stream), markup=False, highlight=False, emoji=False)
    return RichProgress(*columns, TimeRemainingColumn(), console=console, transient=True)


# The object every command writes through.


class Out:
    """Everything a command says.

    Parameters
    ----------
    mode : `human`, `json` (one object on stdout) or `jsonl` (one event a line on stdout).
    verbosity : -1 errors only, 0 as usual, 1 and more for details.
    stdout, stderr : the streams; the process's own when None.
    """

    def __init__(
        self, mode: Mode = "human", verbosity: int = 0, stdout: IO[str] | None = None, stderr: IO[str] | None = None
    ) -> None:
        self.mode: Mode = mode
        self.verbosity = verbosity
        self._stdout = _SafeStream(sys.stdout if stdout is None else stdout)
        self._stderr = _SafeStream(sys.stderr if stderr is None else stderr)
        self._bars: RichProgress | None = None
        self._in_line = False  # whether stdout stands in the middle of a line

    @classmethod
    def asked(cls, args: Sequence[str]) -> Out:
        """What the arguments ask for, read without a parser: for errors that come before or from parsing."""
        flags = args[: args.index("--")] if "--" in args else args
        mode: Mode = "jsonl" if "--jsonl" in flags else "json" if "--json" in flags else "human"
        return cls(mode, -1 if {"-q", "--quiet"} & set(flags) else 0)

    @property
    def human(self) -> bool:
        """Whether a person reads stdout."""
        return self.mode == "human"

    # stdout

    def print(self, text: str = "", end: str = "\n") -> None:
        """Put text for a person on stdout at once; nothing in the machine modes. An answer streams through here."""
        if self.human:
            self._put(clean(text) + end)

    def end_line(self) -> None:
        """End the line that `print` has begun; nothing where it has ended already."""
        if self._in_line:
            self.print()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        """Put a table for a person on stdout; nothing in the machine modes. Numbers stand to the right."""
        if self.human:
            self._put(_render_table(columns, [list(row) for row in rows], title, self._stdout))

    def markdown(self, text: str, for_terminal: str = "") -> None:
        """Put a page on stdout: drawn on a terminal (`for_terminal`, where it reads otherwise), else as it stands."""
        if self.human:
            terminal = self._stdout.isatty()
            self._put(_render_markdown(for_terminal or text) if terminal else text.rstrip("\n") + "\n")

    def json(self, value: Mapping[str, Any]) -> None:
        """Put one JSON object on stdout, on one line, in every mode."""
        self._put(to_json({"schema": SCHEMA} | _plain(value), encoding=self._stdout.encoding) + "\n")

    def result(self, value: Any, human: Callable[[], None]) -> None:
        """End a command: its result as JSON, as the `summary` event, or as `human` draws it.

        Parameters
        ----------
        value : a mapping or a dataclass.
        human : draws the result with `print` and `table`.
        """
        if self.mode == "human":
            human()
        elif self.mode == "json":
            self.json(_plain(value))
        else:
            self.event("summary", **_plain(value))

    def event(self, type: Literal["status", "warning", "error", "summary"], **facts: Any) -> None:
        """Put one event on stdout in the jsonl mode; nothing in the others."""
        if self.mode == "jsonl":
            self.json({"type": type} | facts)

    # stderr

    def status(self, text: str, **facts: Any) -> None:
        """Say what is being done."""
        text = scrubbed(text)
        self.event("status", message=text, **facts)
        if self.verbosity >= 0 and self.mode != "jsonl":
            self._say(text)

    def detail(self, text: str) -> None:
        """Say what only -v wants to know."""
        if self.verbosity >= 1:
            self.status(text)

    def passage(self, pieces: Iterable[tuple[str, int]]) -> None:
        """Show a text on stderr, some of it in a colour (0: none); in square brackets where there are no colours."""
        if self.mode == "jsonl" or self.verbosity < 0:
            return
        plain = self._is_plain()
        marks = ("[", "]") if plain else ("\x1b[1;{}m", "\x1b[0m")
        text = "".join(
            marks[0].format(colour) + clean(piece) + marks[1] if colour else clean(piece) for piece, colour in pieces
        )
        with suppress(OSError, ValueError):
            self._stderr.write(text.rstrip() + "\n")
            self._stderr.flush()

    def warning(self, text: str, hint: str = "", **facts: Any) -> None:
        """Say what the user should know although the work goes on."""
        text, hint = scrubbed(text), scrubbed(hint)
        self.event("warning", message=text, hint=hint, **facts)
        if self.verbosity >= 0:
            self._say(text, label="warning", colour=33)
            if hint:
                self._say(hint, label="hint", colour=36)

    def failed(self, what: str, reason: str) -> None:
        """Say which part of the work failed while the rest goes on; with --quiet too."""
        self.event("warning", message=f"failed: {what}: {reason}", path=what, error=reason)
        self._say(one_line(f"{what}: {reason}"), label="failed", colour=31)

    def error(self, error: KvtoolError, exit_code: int | None = None) -> None:
        """Say why the command ends; in the machine modes also on stdout."""
        facts = error_json(error, exit_code)
        self._say(facts["message"], label="error", colour=31)
        if facts["hint"]:
            self._say(facts["hint"], label="hint", colour=36)
        if self.mode == "json":
            self.json({"error": facts})
        self.event("error", error=facts)

    @contextmanager
    def progress(self, label: str, total: float | None = None, unit: str = "tokens") -> Iterator[Progress]:
        """A bar on a terminal, else a line every ten seconds at -v, a status event each second in the jsonl mode."""
        label = one_line(label)
        if self._draws_bars():
            with _rich_bars(self._stderr, unit) as self._bars:
                try:
                    yield _Bar(self._bars, self._bars.add_task(label, total=total))
                finally:
                    self._bars = None
        elif self.mode == "jsonl":
            yield _Lines(lambda text, facts: self.status(text, **facts), label, total, unit, EVENT_EVERY_S)
        else:
            say = (lambda text, facts: self.detail(text)) if self.verbosity >= 1 else None
            yield _Lines(say, label, total, unit, STATUS_EVERY_S)

    def flush(self) -> None:
        """Make sure that stdout has everything, while a failure can still be reported."""
        self._put("")

    # below

    def _draws_bars(self) -> bool:
        dumb = os.environ.get("TERM") == "dumb"
        return self.verbosity >= 0 and self._bars is None and not dumb and self._stderr.isatty()

    def _put(self, text: str) -> None:
        try:
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

    def _say(self, text: str, label: str = "", colour: int = 0) -> None:
        if self._in_line and self._stdout.isatty() and self._stderr.isatty():
            self.end_line()  # on one screen, not behind half an answer
        line = (f"{self._coloured(label, colour)}: " if label else "") + clean(text) + "\n"
        with suppress(OSError, ValueError):  # nobody is left to hear that nobody hears
            if self._bars is not None:
                from rich.text import Text

                self._bars.console.print(Text.from_ansi(line.rstrip("\n")))
            else:
                self._stderr.write(line)
                self._stderr.flush()

    def _is_plain(self) -> bool:
        return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not self._stderr.isatty()

    def _coloured(self, label: str, colour: int) -> str:
        return label if self._is_plain() else f"\x1b[1;{colour}m{label}\x1b[0m"


def _render_table(columns: Sequence[str], rows: list[list[Any]], title: str, stream: _SafeStream) -> str:
    """Draw a table as text: fitted to a terminal, at its full width into a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = stream.isatty()
    canvas = io.StringIO()
    width = None if terminal else 100_000
    console = Console(file=canvas, force_terminal=terminal, markup=False, highlight=False, emoji=False, width=width)
    table = Table(
        box=box.SIMPLE_HEAD if terminal else None, pad_edge=terminal, title=Text(title) if title and terminal else None
    )
    for index, column in enumerate(columns):
        numbers = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print(table)
    return "".join(line.rstrip() + "\n" for line in canvas.getvalue().splitlines())


def _render_markdown(text: str) -> str:
    """Draw a page of the documentation for a terminal, no wider than is good to read."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    canvas = io.StringIO()
    console = Console(file=canvas, force_terminal=True, theme=Theme({"markdown.code": "cyan"}))
    page = Markdown(text, hyperlinks=False, code_theme="ansi_dark")
    console.print(page, width=min(console.width, 120))
    return canvas.getvalue()


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
