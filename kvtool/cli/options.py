"""Options of commands: the flags that rooms declare, their parsing, and the `Run` that a command gets.

A command is a function of its name, decorated with `takes`::

    @takes(QueryOptions, ModelOptions, StoreOptions.some("store"), examples=('query "Who?"', …))
    def query(run: Run, question: Annotated[str, typer.Argument(help="What to ask.")]) -> None:
        \"\"\"Answer a question from the store's documents.\"\"\"
        run.get(QueryOptions).ratio, run.folder

`takes` puts in the place of the parameter `run` the flags of these options, under their groups' headings and in this
order, then those of every command (`--json`, …). It resolves all layers before the function runs, so no command
declares or checks a value of its own. `run.get` gives a room's options with the values in force, also those that a
variable or a file says and the command has no flag for. An exit code other than 0 is returned as an `int`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from kvtool.cli.commands import EVERYWHERE, HELP_ALL, Command
from kvtool.cli.out import Mode, Out
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.collecting import paused_collection
from kvtool.core.common.machine import check_switches
from kvtool.core.common.plugins import troubles
from kvtool.core.common.text import shown_size
from kvtool.core.common.types import Timeline, add_span
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Option, Options, Part, options_of
from kvtool.core.options.resolve import O, Resolved, resolve
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import RemoteOptions, TrustOptions
from kvtool.serve.options import KeepOptions, ServeOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session


R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
# Whose options a variable or a configuration file can give.
SETTINGS: tuple[type[Options], ...] = (
    *(StoreOptions, LockOptions, ModelOptions),
    *(IngestOptions, QueryOptions, RemoteOptions, TrustOptions, ServeOptions, KeepOptions),
)

# What every command takes, so that a script can add it to all of them; it is shown where it means something.
ANYWHERE: tuple[type[Options], ...] = (StoreOptions, LockOptions, RemoteOptions, ModelOptions)


_DEVICE = "device"  # the option of commands that may run the model


@dataclass(frozen=True, slots=True)
class Run:
    resolved: Resolved
    out: Out

    def get(self, source: type[O]) -> O:
        return self.resolved.get(source)

    @property
    def folder(self) -> Path:
        return self.get(StoreOptions).folder

    def open_store(self) -> Store:
        from kvtool.core.cache.store import Store

        return Store.open(self.folder)

    @property
    def max_loss(self) -> float:
        return self.resolved.get(QueryOptions, "set").max_loss

    @property
    def lock_wait(self) -> float:
        return self.get(LockOptions).lock_wait


def takes(
    *wanted: type[Options] | Part,
    examples: tuple[str, ...] = (),
    common: str = "",
    cls: type[typer.core.TyperCommand] = Command,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the flags of these options, and those of every command.

    `wanted`: rooms' options, or some of them, in the order of the help. `examples`: without the word `kvtool`.
    `common`: names of the options that `--help` shows, in its order; empty: all. `cls`: how it reads its words.
    """
    chosen = _chosen(wanted)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(function, eval_str=True)
        unused = {name: option for name, option in _chosen(ANYWHERE).items() if name not in {*chosen, *own.parameters}}

        @functools.wraps(function)
        def command(**values: Any) -> R:
            config, _ = values.pop("config"), values.pop("help_all", None)
            out = _out(**{name: values.pop(name) for name in EVERYWHERE if name in values})
            flags = {option: values.pop(name) for name, option in (chosen | unused).items()}
            sources = (each.source if isinstance(each, Part) else each for each in wanted)
            run = Run(resolve((*SETTINGS, *sources), flags, config=config), out)
            for trouble, hint in (*run.resolved.warnings, *troubles()):
                out.warning(trouble, hint)
            if _DEVICE in chosen:
                check_switches()
            return function(run=run, **values)

        mine = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "run"]
        options = [_parameter(name, option) for name, option in chosen.items()]
        options += [_parameter(name, option, hidden=True) for name, option in unused.items()]
        vars(command).update(examples=examples, options=chosen, common=common.split(), cls=cls)
        shared = EVERYWHERE | ({"help_all": (HELP_ALL, False)} if common else {})
        keywords = [_keyword(name, *each) for name, each in shared.items()]
        parameters = [*mine, *options, *keywords]  # for typer, which reads the signature and the annotations
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        del command.__wrapped__
        return command

    return decorate


def _chosen(wanted: tuple[type[Options] | Part, ...]) -> dict[str, Option]:
    chosen: dict[str, Option] = {}
    for each in wanted:
        known = options_of(each.source if isinstance(each, Part) else each)
        for name in each.names if isinstance(each, Part) else known:
            if known[name].flag and chosen.setdefault(name, known[name]).key != known[name].key:
                raise ValueError(f"two options are called {name}")
    return chosen


def _parameter(name: str, option: Option, hidden: bool = False) -> inspect.Parameter:
    """Make an option's flag. Its text is parsed in one place for all layers, so typer sees text only."""
    kind: Any = bool if option.kind is bool else list[str] if option.many else str
    shown = typer.Option(
        option.flag,
        *option.synonyms,
        help=described_option(option),
        show_default=False,
        metavar=None if option.kind is bool else option.metavar,
        autocompletion=_completion(option),
        rich_help_panel=option.group or None,
        hidden=hidden,
    )
    return _keyword(name, Annotated[kind | None, shown], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def described_option(option: Option) -> str:
    default = option.default_text
    facts = [f"default: {default}"] if default else []
    facts += ["repeatable"] if option.many and "," not in option.metavar else []  # with a comma it is obvious
    return f"{option.help}  [{'; '.join(facts)}]" if facts else option.help


def _completion(option: Option) -> Callable[[str], list[str]] | None:
    words = option.choices or option.suggest
    return (lambda incomplete: [word for word in words if word.startswith(incomplete)]) if words else None


def _out(*, json: bool, jsonl: bool, quiet: bool, verbose: int) -> Out:
    for first, second, both in (("--json", "--jsonl", json and jsonl), ("--quiet", "--verbose", quiet and verbose)):
        if both:
            raise UsageError(f"{first} and {second} exclude each other", "keep one of them")
    mode: Mode = "jsonl" if jsonl else "json" if json else "human"
    return Out(mode, -1 if quiet else verbose)


class ManyValues(Command):
    """A command whose repeatable options take several values at once: `--chunks A B C`; those of `NAME=VALUE` take one.

    Where such a run of words is all that could hold the command's argument, its last word is that.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._spread(list(args)))

    def _spread(self, args: list[str]) -> list[str]:
        options = {flag: option for option in self.params for flag in option.opts if flag.startswith("-")}
        out: list[str] = []
        positional, run = False, ""  # the option whose values are being read
        last = 0  # index in `out` of the last value after an option's first one
        at = 0
        while at < len(args):
            word, option = args[at], options.get(args[at])
            at += 1
            if word == "--":
                return [*out, word, *args[at:]]
            if word.startswith("-") and word != "-":
                out.append(word)
                run = ""
                if option is not None and not is_flag(option):
                    out += args[at : at + 1]
                    at += 1
                    run = word if option.multiple and "=" not in str(option.metavar) else ""
            elif run:
                out += [run, word]
                last = len(out) - 1
            else:
                out.append(word)
                positional = True
        takes_one = any(option.param_type_name == "argument" for option in self.params)
        return out if positional or not last or not takes_one else [*out[: last - 1], *out[last + 1 :], out[last]]


class Question(ManyValues):
    """A command whose argument is one question: several words are joined."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        further = super().parse_args(ctx, args)
        if further:
            (name,) = (each.name for each in self.params if each.param_type_name == "argument")
            ctx.params[name] = " ".join([ctx.params[name], *further])
        ctx.args = []
        return []


def is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False) or getattr(option, "count", False))


def open_any_store(run: Run) -> Store:
    place = run.get(StoreOptions).place
    if isinstance(place, Path):
        return run.open_store()
    from kvtool.core.remote.mirror import open_shared

    timeout = run.get(RemoteOptions).remote_timeout
    return open_shared(place, timeout=timeout, lock_wait=run.lock_wait, warn=run.out.warning)


def load_session(
    run: Run,
    store: Store,
    finder: Finder | None = None,
    timeline: Timeline | None = None,
    memory_cache: int | None = None,
    stores_missed: bool = True,
    checks_later: bool = False,
) -> Session:
    started = time.perf_counter()
    with paused_collection():
        importlib.import_module("kvtool.core.query.answer")  # torch and transformers come with it
        from kvtool.core.fusion.source import RecentChunks
        from kvtool.core.session.session import Session
    add_span(timeline, "import", started)
    started = time.perf_counter()
    session = Session.open(
        store,
        run.get(ModelOptions),
        warn=run.out.warning,
        finder=finder,
        say=run.out.status,
        timeline=timeline,
        memory_cache=memory_cache,
        recent_chunks=None if memory_cache is None else RecentChunks(memory_cache),
        missed=None if stores_missed else {},
        checks_later=checks_later,
    )
    run.out.doing(f"loading the model {session.identity.model}")
    loaded = session.decoder.loaded
    add_span(timeline, "load model", started)
    run.out.detail(
        f"{loaded.files.ref} on {loaded.device} in {loaded.arithmetic.dtype}, loaded in {loaded.load_ms:.0f} ms"
    )
    return session


def tell_budget(run: Run, max_size: int | None) -> None:
    if max_size is None:
        return
    with suppress(KvtoolError), run.open_store() as store:  # otherwise the command reports the error
        kept = store.budget()
        if kept is not None and kept != max_size:
            run.out.status(
                f"--max-size {shown_size(max_size)} takes the place of the store's own budget of {shown_size(kept)}"
            )
