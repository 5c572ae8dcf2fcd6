"""What every command shares: its flags, made from the rooms' options, and the `Run` it gets.

A command module holds `app`, made by `new_app`, and decorates its functions with `takes`::

    @dataclass(frozen=True, kw_only=True)
    class QueryFlags(Options):  # what only the command line has; see core/options/option.py
        batch: Path | None = option(None, "Answer every question of a file.", group=ANSWER, setting=False)

    app = new_app()

    @app.command()
    @takes(QueryFlags, QueryOptions, ModelOptions, StoreOptions.some("store"), examples=('query "Who?"', …))
    def query(run: Run, question: Annotated[str, typer.Argument(help="What to ask.")]) -> None:
        \"\"\"Answer a question from the store's documents.\"\"\"
        run.get(QueryFlags).batch, run.get(QueryOptions).ratio, run.folder

`takes` puts in the place of the parameter `run` the flags of these options, under their groups' headings and in this
order, then those of every command (`--json`, …). It resolves all layers before the function runs, so no command
declares or checks a value of its own. `run.get` gives a room's options with the values in force, also those that a
variable or a file says and the command has no flag for. An exit code other than 0 is returned as an `int`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from kvtool.cli.commands import OUTPUT
from kvtool.cli.out import Mode, Out
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.arithmetic import FEATURES, lacks_avx2
from kvtool.core.common.plugins import troubles
from kvtool.core.common.switches import check_switches
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Option, Options, Part, options_of
from kvtool.core.options.resolve import O, Resolved, resolve
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import RemoteOptions, TrustOptions
from kvtool.serve.options import ServeOptions

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
# Whose options a variable or a configuration file can give.
SETTINGS: tuple[type[Options], ...] = (
    *(StoreOptions, LockOptions, ModelOptions),
    *(IngestOptions, QueryOptions, RemoteOptions, TrustOptions, ServeOptions),
)

# What every command takes, so that a script can add it to all of them; it is shown where it means something.
_ANYWHERE: tuple[type[Options], ...] = (StoreOptions, LockOptions, ModelOptions)


_DEVICE = "device"  # the option of commands that may run the model
_OLD_CPU = "no AVX2: the model and kvtool's own kernels run at about a quarter of the speed of a CPU that has it"


def _warn_of_old_cpu(out: Out) -> None:
    if os.environ.get(FEATURES):
        out.warning(
            f"{FEATURES} names {_OLD_CPU}", f"answers are the same; unset {FEATURES} for all that the CPU can do"
        )
    else:
        out.warning(
            f"this CPU has {_OLD_CPU}", "answers are the same; a CPU from after 2013 or `--device cuda` is faster"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What a command function gets.

    Parameters
    ----------
    resolved : what flags, variables and files say.
    out : where it writes.
    """

    resolved: Resolved
    out: Out

    def get(self, source: type[O]) -> O:
        """A room's options with the values in force."""
        return self.resolved.get(source)

    @property
    def folder(self) -> Path:
        """The store's folder. Raises UsageError for a URL."""
        return self.get(StoreOptions).folder

    @property
    def max_loss(self) -> float:
        """Nats a token that questions may lose."""
        return self.resolved.get(QueryOptions, "max_loss").max_loss

    @property
    def lock_wait(self) -> float:
        """Seconds to wait for another process that writes to the store."""
        return self.get(LockOptions).lock_wait


def takes(
    *wanted: type[Options] | Part, examples: tuple[str, ...] = ()
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the flags of these options, and those of every command.

    Parameters
    ----------
    wanted : rooms' options, or some of them (`QueryOptions.some("top_k")`), in the order of the help.
    examples : command lines for the help, without the word `kvtool`.
    """
    chosen = _chosen(wanted)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(function, eval_str=True)
        unused = {name: option for name, option in _chosen(_ANYWHERE).items() if name not in {*chosen, *own.parameters}}

        @functools.wraps(function)
        def command(**values: Any) -> R:
            out = _out(**{name: values.pop(name) for name in _OUTPUT})
            config = values.pop("config")
            flags = {option: values.pop(name) for name, option in (chosen | unused).items()}
            run = Run(resolve((*SETTINGS, *_sources(wanted)), flags, config=config), out)
            for trouble, hint in troubles():
                out.warning(trouble, hint)
            if _DEVICE in chosen:
                check_switches()
                if lacks_avx2():
                    _warn_of_old_cpu(out)
            return function(run=run, **values)

        mine = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "run"]
        options = [_parameter(name, option) for name, option in chosen.items()]
        options += [_parameter(name, option, hidden=True) for name, option in unused.items()]
        command.examples, command.options = examples, chosen  # type: ignore[attr-defined]
        return _with_parameters(command, [*mine, *options, *_SHARED])

    return decorate


def _sources(wanted: tuple[type[Options] | Part, ...]) -> list[type[Options]]:
    return [each.source if isinstance(each, Part) else each for each in wanted]


def _chosen(wanted: tuple[type[Options] | Part, ...]) -> dict[str, Option]:
    """The wanted options that have a flag, by the name that typer knows them under."""
    chosen: dict[str, Option] = {}
    for each in wanted:
        known = options_of(each.source if isinstance(each, Part) else each)
        for name in each.names if isinstance(each, Part) else known:
            if known[name].flag and chosen.setdefault(name, known[name]).key != known[name].key:
                raise ValueError(f"two options are called {name}")
    return chosen


def _with_parameters(command: Callable[..., R], parameters: list[inspect.Parameter]) -> Callable[..., R]:
    """Show these parameters to typer, which reads the signature and the annotations."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]
    return command


def _parameter(name: str, option: Option, hidden: bool = False) -> inspect.Parameter:
    """One option as a flag. Its text is parsed in one place for all layers, so typer sees text only."""
    kind: Any = bool if option.kind is bool else list[str] if option.many else str
    shown = typer.Option(
        option.flag,
        *option.synonyms,
        help=f"{option.help}{_facts(option)}",
        show_default=False,
        metavar=None if option.kind is bool else option.metavar,
        autocompletion=_completion(option),
        rich_help_panel=option.group or None,
        hidden=hidden,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )


def _facts(option: Option) -> str:
    """How the help's line of an option ends: its default, and whether it is given once for each of several values. Its
    variable and its key follow one rule (`_RULE`)."""
    default = option.default_text
    facts = [f"default: {default}"] if default else []
    facts += ["repeatable"] if option.many and "," not in option.metavar else []  # with a comma it shows by itself
    return f"  [{'; '.join(facts)}]" if facts else ""


def _completion(option: Option) -> Callable[[str], list[str]] | None:
    words = option.choices or option.suggest
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


_CONFIG = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="User config file.  [env: KVTOOL_CONFIG]", rich_help_panel=OUTPUT),
]


def _flag(kind: Any, *flags: str, help: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*flags, help=help, rich_help_panel=OUTPUT, show_default=False, **more)]


_OUTPUT: dict[str, tuple[Any, Any]] = {
    "json": (_flag(bool, "--json", help="One JSON object on stdout."), False),
    "jsonl": (_flag(bool, "--jsonl", help="One JSON event a line on stdout."), False),
    "quiet": (_flag(bool, "--quiet", "-q", help="Errors only."), False),
    "verbose": (_flag(int, "--verbose", "-v", help="Say more.", count=True), 0),
}
_SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, (annotation, default) in ({"config": (_CONFIG, None)} | _OUTPUT).items()
]


def _out(*, json: bool, jsonl: bool, quiet: bool, verbose: int) -> Out:
    for first, second, both in (("--json", "--jsonl", json and jsonl), ("--quiet", "--verbose", quiet and verbose)):
        if both:
            raise UsageError(f"{first} and {second} exclude each other", "keep one of them")
    mode: Mode = "jsonl" if jsonl else "json" if json else "human"
    return Out(mode, -1 if quiet else verbose)
