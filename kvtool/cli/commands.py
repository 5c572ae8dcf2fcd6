"""Commands, groups of them, and the layout of their help. It imports no options: an overview has none."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

import typer
import typer.core
import typer.main

from kvtool.cli.progress import hide_activity
from kvtool.core.errors import UsageError

if TYPE_CHECKING:
    from kvtool.core.options.option import Option

F = TypeVar("F", bound=Callable[..., Any])
ARGUMENTS, COMMON = "Arguments", "Options"  # headings
_COLUMN = 22  # cells of an option's flags; a longer one has its text on the next line


def _flag(kind: Any, *flags: str, help: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*flags, help=help, show_default=False, **more)]


# The flags of every command, with their defaults. The overview describes them; the help of a command only names them.
EVERYWHERE: dict[str, tuple[Any, Any]] = {
    "json": (_flag(bool, "--json", help="Print one JSON object."), False),
    "jsonl": (_flag(bool, "--jsonl", help="Print one JSON event per line, while the command runs."), False),
    "quiet": (_flag(bool, "--quiet", "-q", help="Print errors only."), False),
    "verbose": (_flag(int, "--verbose", "-v", help="Print more details.", count=True), 0),
    "config": (
        _flag(str | None, "--config", metavar="FILE", help="Read settings from this file.  [env: KVTOOL_CONFIG]"),
        None,
    ),
}
_EVERY_OPTION = "kvtool.every_option"  # in a context's `meta`, if the help lists all options


def _show_every_option(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_EVERY_OPTION] = True
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


HELP_ALL = _flag(
    bool, "--help-all", help="Show all options.", is_eager=True, expose_value=False, callback=_show_every_option
)


class App(typer.Typer):
    def command(self, name: str | None = None, **more: Any) -> Callable[[F], F]:
        return lambda function: super(App, self).command(name, cls=getattr(function, "cls", Command), **more)(function)


def new_app(help: str = "", add_completion: bool = False) -> App:
    """A group of commands: plain help (rich would triple its time), `-h`."""
    return App(
        cls=Group,
        help=help or None,
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


@functools.cache  # typer reads every signature anew
def build_command(command: Any) -> Any:
    """Build a command of a function with `takes`, or a group of a `typer.Typer`."""
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    alone = new_app()
    alone.command()(command)
    return typer.main.get_command(alone)


_RULE = "Variables (KVTOOL_TOP_K) and kvtool.toml set defaults: see `kvtool config`."
_ALSO = "Also: --json, --jsonl, -q, -v and --config FILE, described in `kvtool --help`."


class _Plain:
    """A parameter whose value needs no converting if it was not given, or has the wanted type as it is.

    typer's conversion imports pydantic and makes a validator of each parameter: a quarter of what a command took to
    start. What options mean is read where they are declared (`core/options`) anyway.
    """

    def __init__(self, param: Any) -> None:
        vars(self).update(vars(param))

    def process_value(self, ctx: Any, value: Any) -> Any:
        param: Any = self
        is_ready = type(value) is param.type_descriptor.annotation or (value is None and not param.required)
        if not is_ready:
            return super().process_value(ctx, value)  # type: ignore[misc]
        return param.callback(ctx, self, value) if value and param.callback else value


class Flag(_Plain, typer.core.TyperOption):
    pass


class Argument(_Plain, typer.core.TyperArgument):
    pass


@functools.cache  # the parser tells parameters apart by identity
def _plain(param: Any) -> Any:
    return Flag(param) if isinstance(param, typer.core.TyperOption) else Argument(param)


class _Described:
    """Help with examples first, then the common options, or all under the headings of their groups."""

    callback: Any

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(param) for param in super().get_params(ctx)]  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; an error names this command, whose help it points to: an option without its value does
        not name any."""
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return rest
        except typer.TyperException as error:
            raise usage_error(error, ctx) from error

    @property
    def options(self) -> Mapping[str, Option]:
        return getattr(self.callback, "options", {})

    @property
    def examples(self) -> tuple[str, ...]:
        return getattr(self.callback, "examples", ())

    @property
    def common(self) -> Sequence[str]:
        """The options that the help shows, by name; `--help-all` shows the others. Empty: all are shown."""
        return getattr(self.callback, "common", ())

    def get_help(self, ctx: Any) -> str:
        text: str = super().get_help(ctx)  # type: ignore[misc]
        with hide_activity(until_new_words=True):
            return text

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)  # type: ignore[misc]
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}kvtool {line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = described(self, ctx)
        if self.common and not ctx.meta.get(_EVERY_OPTION):
            sections = _of_common(sections, self.common)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([row.record for row in rows], col_max=_COLUMN)
        self.format_end(ctx, formatter)

    def format_end(self, ctx: Any, formatter: Any) -> None:
        lines = [_ALSO] if hasattr(self.callback, "options") else []
        lines += [_RULE] if any(option.setting for option in self.options.values()) else []
        if self.common and not ctx.meta.get(_EVERY_OPTION):
            left = len(self.options) - len(self.common)
            lines.insert(0, f"`{ctx.command_path} --help-all` shows {left} more options.")
        if lines:
            formatter.write_paragraph()
        for line in lines:
            formatter.write_text(line)


def usage_error(error: typer.TyperException, context: Any = None) -> UsageError:
    """Return typer's error as one of ours. `context`: of the command, where the error names none."""
    context = getattr(error, "ctx", None) or context
    path = context.command_path if context else "kvtool"
    return UsageError(error.format_message(), f"`{path} --help` shows what is possible")


class Command(_Described, typer.core.TyperCommand):
    """A command."""


class Group(_Described, typer.core.TyperGroup):
    """Commands below one name: they are listed before its own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def format_end(self, ctx: Any, formatter: Any) -> None:
        super().format_end(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"`{ctx.command_path} COMMAND --help` shows the options of a command.")


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter of a command, as its help describes it; `option` is None for arguments and the flags of every
    command."""

    record: tuple[str, str]
    option: Option | None = None


def described(command: Any, context: Any) -> dict[str, list[Described]]:
    """Return a command's own parameters by heading, in the order of its help, without the flags of every command."""
    sections: dict[str, list[Described]] = {}
    everywhere = {*EVERYWHERE, "help", "help_all"} if hasattr(command.callback, "options") else {"help"}
    for param in command.get_params(context):
        if getattr(param, "hidden", False) or param.name in everywhere:
            continue
        option = getattr(command, "options", {}).get(param.name)
        record = _record(param, context, option.synonyms if option else ())
        if record is not None:
            is_argument = param.param_type_name == "argument"
            heading = ARGUMENTS if is_argument else getattr(param, "rich_help_panel", None) or COMMON
            sections.setdefault(heading, []).append(Described(record, option))
    return sections


def _of_common(sections: dict[str, list[Described]], names: Sequence[str]) -> dict[str, list[Described]]:
    rows = {row.option.name: row for rows in sections.values() for row in rows if row.option}
    arguments = {ARGUMENTS: sections[ARGUMENTS]} if ARGUMENTS in sections else {}
    return arguments | {COMMON: [rows[name] for name in names]}


def everywhere() -> list[tuple[str, str]]:
    declared = [get_args(annotation)[1] for annotation, _ in EVERYWHERE.values()]
    rows = [(", ".join([*each.param_decls, each.default]) + f" {each.metavar or ''}", each.help) for each in declared]
    return [(flags.rstrip(), help) for flags, help in rows] + [("-h, --help", "Show the help of a command.")]


def _record(param: Any, context: Any, synonyms: tuple[str, ...]) -> tuple[str, str] | None:
    shown = copy.copy(param)
    shown.opts = [flag for flag in param.opts if flag not in synonyms]
    record = shown.get_help_record(context)
    return record and (re.sub(r" <[^>]*>", "", record[0]), record[1])


class LazyGroup(Group):
    """A group that lists placeholders, and loads only the invoked or completed command. `lines`: help by name."""

    lines: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, line in self.lines.items():
            self.add_command(typer.core.TyperCommand(name, help=line, rich_markup_mode=None))

    def load(self, name: str) -> Any:
        raise NotImplementedError

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the named command as usual, then put the real one in its place."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name and stand_in else None, rest
