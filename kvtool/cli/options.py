"""What every command shares: its flags, made from the settings' metadata, and the `Run` it gets.

A command module holds `app`, made by `new_app`, and decorates its functions with `takes`::

    app = new_app()

    @app.command()
    @takes("query")
    def query(run: Run, question: Annotated[str, typer.Argument(help="What to ask.")]) -> None:
        \"\"\"Find, load, fuse, answer.\"\"\"
        run.settings.ratio, run.out.print(answer, end="")

`takes` replaces the parameter `run` by the shared flags (`--store`, `--json`, ...) and by those of the named
sections or keys; it resolves all layers before the function runs, so no command declares or checks a setting.
A command with no settings of its own uses `@takes()`. An exit code other than 0 is returned as an `int`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from kvtool.cli.out import Mode, Out
from kvtool.core.errors import UsageError
from kvtool.core.options.resolve import Resolved, resolve
from kvtool.core.options.settings import Key, Settings, keys, sections

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Run:
    """What a command function gets.

    Parameters
    ----------
    resolved : the settings in force and their origins.
    out : where it writes.
    """

    resolved: Resolved
    out: Out

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.resolved.settings


def new_app(help: str = "") -> typer.Typer:
    """A command module's `app`: plain help (rich would triple its time), `-h`, no completion flags of its own."""
    return typer.Typer(
        help=help or None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


def takes(*wanted: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the flags of these sections (`ingest`, `query`) or single keys, and the shared ones.

    Parameters
    ----------
    wanted : names of sections or of keys.
    """
    chosen = _chosen(wanted)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def command(**values: Any) -> R:
            out = _out(**{name: values.pop(name) for name in _OUTPUT})
            flags = {name: values.pop(name) for name in (*chosen, "config")}
            return function(run=Run(resolve(flags), out), **values)

        mine = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "run"]
        shared = [_parameter(key) for key in chosen.values()]
        return _with_parameters(command, [*mine, *shared, *_shared_parameters()])

    return decorate


def _with_parameters(command: Callable[..., R], parameters: list[inspect.Parameter]) -> Callable[..., R]:
    """Show these parameters to typer, which reads the signature and the annotations."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]
    return command


def _chosen(wanted: tuple[str, ...]) -> dict[str, Key]:
    """The keys of the wanted sections and those that every command takes, by name."""
    unknown = set(wanted) - sections() - set(keys())
    if unknown:
        raise ValueError(f"neither a section nor a key: {sorted(unknown)}")
    mine = {n: k for n, k in keys().items() if n in wanted or set(wanted) & set(k.sections)}
    return mine | {n: k for n, k in keys().items() if not k.sections}


def _parameter(key: Key) -> inspect.Parameter:
    """One setting as a flag. Its text is parsed in one place for all layers, so typer sees text only."""
    help = f"{key.help}{_facts(key)}"
    declared: Any
    if key.kind is bool:
        both = f"{key.flag}/--no-{key.flag[2:]}"
        declared = Annotated[bool | None, typer.Option(both, help=help, show_default=False)]
    else:
        complete = _completion(key)
        option = typer.Option(key.flag, help=help, show_default=False, metavar=key.metavar, autocompletion=complete)
        declared = Annotated[str | None, option]
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=declared)


def _facts(key: Key) -> str:
    default = "" if key.default in (None, "", False) else f"default: {key.default}; "
    return f"  [{default}env: {key.env}]"


def _completion(key: Key) -> Callable[[str], list[str]] | None:
    words = key.choices or key.suggest
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


def _shared_parameters() -> Iterator[inspect.Parameter]:
    for name, (annotation, default) in (_CONFIG | _OUTPUT).items():
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_CONFIG: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[str | None, typer.Option("--config", metavar="FILE", help="User config file.  [env: KVTOOL_CONFIG]")],
        None,
    )
}
_OUTPUT: dict[str, tuple[Any, Any]] = {
    "json": (Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")], False),
    "jsonl": (Annotated[bool, typer.Option("--jsonl", help="One JSON event a line on stdout.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")], False),
    "verbose": (Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.", show_default=False)], 0),
}


def _out(*, json: bool, jsonl: bool, quiet: bool, verbose: int) -> Out:
    for first, second, both in (("--json", "--jsonl", json and jsonl), ("--quiet", "--verbose", quiet and verbose)):
        if both:
            raise UsageError(f"{first} and {second} exclude each other", "keep one of them")
    mode: Mode = "jsonl" if jsonl else "json" if json else "human"
    return Out(mode, -1 if quiet else verbose)
