"""Commands and groups of them, and how their help is laid out. It imports no room: an overview needs no options."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import typer
import typer.core

from kvtool.cli import spinner

if TYPE_CHECKING:
    from kvtool.core.options.option import Option

F = TypeVar("F", bound=Callable[..., Any])
OUTPUT = "Output"  # the heading of the flags that every command has


class App(typer.Typer):
    """A command module's commands."""

    def command(
        self, name: str | None = None, *, cls: type[typer.core.TyperCommand] | None = None, **more: Any
    ) -> Callable[[F], F]:
        """Register a command as typer does, with our `Command` for its class."""
        return super().command(name, cls=cls or Command, **more)


def new_app(help: str = "") -> App:
    """A command module's `app`: plain help (rich would triple its time), `-h`, no completion flags of its own."""
    return App(
        cls=Group,
        help=help or None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


_RULE = "`kvtool config` lists what variables (KVTOOL_TOP_K) and kvtool.toml (top_k = 5) can set."


class _Described:
    """Help with examples first and with the options under the headings of their groups."""

    callback: Any

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; an error names this command, whose help it points to: an option without its value does
        not name any."""
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return rest
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, `--help` with them; what is given to them is converted where it has to be."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if "process_value" not in vars(param):
                param.process_value = functools.partial(self._value_of, param, param.process_value)
        return params

    def _value_of(self, param: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
        """The value of a parameter; one that was not given, or has the wanted type as it is, needs no converting.

        `convert`, which is typer's, imports pydantic and makes a validator of each parameter: a quarter of what a
        command took to start. What options mean is read where they are declared (`core/options`) anyway.
        """
        is_ready = type(value) is param.type_descriptor.annotation or (value is None and not param.required)
        if not is_ready:
            return convert(context, value)
        return value if param.callback is None else param.callback(context, param, value)

    @property
    def options(self) -> Mapping[str, Option]:
        """The options behind its flags, by the names that typer knows them under."""
        return getattr(self.callback, "options", {})

    @property
    def examples(self) -> tuple[str, ...]:
        """Command lines for the help, without the word `kvtool`."""
        return getattr(self.callback, "examples", ())

    def get_help(self, ctx: Any) -> str:
        """The help; it is what the terminal waited for."""
        text: str = super().get_help(ctx)  # type: ignore[misc]
        with spinner.aside(until_new_words=True):
            return text

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)  # type: ignore[misc]
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}kvtool {line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, rows in described(self, ctx).items():
            with formatter.section(heading):
                formatter.write_dl([row.record for row in rows])
        if any(option.setting for option in self.options.values()):
            formatter.write_paragraph()
            formatter.write_text(_RULE)


class Command(_Described, typer.core.TyperCommand):
    """A command."""


class Group(_Described, typer.core.TyperGroup):
    """Commands below one name: they are listed before its own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)


@dataclass(frozen=True, slots=True)
class Described:
    """What the help says of one parameter of a command.

    Parameters
    ----------
    record : its flags with what they take, and the sentence on it with its default.
    option : the declaration behind it; None for an argument and for the flags that every command has.
    """

    record: tuple[str, str]
    option: Option | None = None


def described(command: Any, context: Any) -> dict[str, list[Described]]:
    """A command's parameters by the headings that they stand under, in the order of its help."""
    sections: dict[str, list[Described]] = {}
    for param in [each for each in command.get_params(context) if not getattr(each, "hidden", False)]:
        option = getattr(command, "options", {}).get(param.name)
        record = _record(param, context, option.synonyms if option else ())
        if record is not None:
            sections.setdefault(_heading(param), []).append(Described(record, option))
    return sections


def _heading(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or (OUTPUT if "--help" in param.opts else "Options")


def _record(param: Any, context: Any, synonyms: tuple[str, ...]) -> tuple[str, str] | None:
    """What the help says of a parameter, without the flags that are only synonyms and typer's names of types."""
    every = param.opts
    param.opts = [flag for flag in every if flag not in synonyms]
    try:
        record = param.get_help_record(context)
    finally:
        param.opts = every
    return record and (re.sub(r" <[^>]*>", "", record[0]), record[1])
