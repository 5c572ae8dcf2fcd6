"""Runs of an evaluation: fusion modes, each with how much it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.evaluate.measures import run_name
from kvtool.core.fusion.selectors import REFERENCE, SELECTORS
from kvtool.core.options.option import Option, options_of
from kvtool.core.query.options import QueryOptions

RATIOS = ("0.02", "0.05", "0.1", "0.15", "0.25", "0.5")
_HINT = "a run is MODE or MODE:AMOUNT, such as reuse, epic:16, blend:0.15 or union:5%; MODE+OPTION=VALUE changes a mode"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A mode, how much it recomputes, and what else of it is not as usual.

    Attributes
    ----------
    name : the same for every way to write the same run; results are kept under it.
    knob : the option that `amount` sets, such as `ratio`; "" where the mode has none.
    changes : other options of the mode and their values, by name.
    """

    mode: str
    knob: str = ""
    amount: float | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def variant(self) -> str:
        """The mode and its changes."""
        return run_name(self.mode, self.changes, None)

    @property
    def name(self) -> str:
        return run_name(self.mode, self.changes, self.amount)

    def options(self, base: QueryOptions) -> QueryOptions:
        """Put this run's mode, amount and changes into the options `base`."""
        changed: dict[str, Any] = dict(self.changes)
        if self.amount is not None:
            changed[self.knob] = self.amount
        return replace(base, fusion=self.mode, **changed)


def parse_runs(texts: Iterable[str] = ()) -> list[RunSpec]:
    """Read runs, in the order given and each once; commas separate, too. Nothing given: `default_runs`.

    The reference is left out: it always runs.

    Raises
    ------
    UsageError : no such mode, or an amount that the mode does not take.
    """
    given = list(texts)
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if given and not words:
        raise UsageError("--runs names no run", _HINT)
    runs = dict.fromkeys(parse_run(word) for word in (words or default_runs()))
    return [run for run in runs if run.mode != REFERENCE]


def usual_runs() -> list[RunSpec]:
    """List every mode that reuses what full prefill would not give, as it is by default."""
    return [parse_run(mode) for mode, kind in SELECTORS.items() if not kind.lossless]


def parse_run(text: str) -> RunSpec:
    """Read one run: `mode` or `mode:amount`; `mode+option=value` changes an option of the mode. The amount is a ratio
    (0 … 1, or in percent) or a number of tokens.

    Raises
    ------
    UsageError : no such mode, or an amount or an option that the mode does not take.
    """
    variant, colon, amount = (part.strip() for part in text.partition(":"))
    mode, *changes = (part.strip() for part in variant.split("+"))
    if mode not in SELECTORS:
        raise UsageError(
            f"run {text!r}: there is no fusion mode {mode!r}",
            did_you_mean(mode, SELECTORS) or f"known: {', '.join(SELECTORS)}; {_HINT}",
        )
    knob, changed = _knob(mode), tuple(sorted(_change(mode, change, f"run {text!r}") for change in changes))
    if knob is None and colon:
        raise UsageError(f"run {text!r}: {mode} takes no amount", f"write {variant}")
    if knob is None:
        return RunSpec(mode, changes=changed)
    return RunSpec(mode, knob.name, knob.parse(amount, f"run {text!r}") if colon else knob.default, changed)


def default_runs() -> Iterator[str]:
    """List every mode that reuses what full prefill would not give: at some ratios, or as it is by default."""
    for mode, kind in SELECTORS.items():
        knob = _knob(mode)
        if knob is not None and knob.unit == "percentage":
            yield from (f"{mode}:{ratio}" for ratio in RATIOS)
        elif not kind.lossless:
            yield parse_run(mode).name


def ordered(names: Iterable[str]) -> list[str]:
    """Order the names of runs by mode, as the registry has them, then by amount."""
    modes = list(SELECTORS)

    def place(name: str) -> tuple[int, str, float]:
        variant, _, amount = name.partition(":")
        mode = variant.partition("+")[0]
        return modes.index(mode) if mode in modes else len(modes), variant, float(amount or 0)

    return sorted(names, key=place)


def _knob(mode: str) -> Option | None:
    """Find the option of a query that says how much a mode recomputes."""
    knob = SELECTORS[mode].knob
    return options_of(QueryOptions)[knob] if knob else None


def _change(mode: str, text: str, where: str) -> tuple[str, Any]:
    """Read `option=value`: a parameter of the mode that is an option of a query, other than its knob."""
    name, _, value = (part.strip() for part in text.partition("="))
    known = [field.name for field in fields(cast(Any, SELECTORS[mode])) if field.name != SELECTORS[mode].knob]
    if name not in known:
        hint = did_you_mean(name, known) or (f"known: {', '.join(known)}" if known else "leave it out")
        raise UsageError(f"{where}: {mode} has no option {name!r}", hint)
    return name, options_of(QueryOptions)[name].parse(value, where)
