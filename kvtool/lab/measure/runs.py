"""What is evaluated: fusion modes, each with how much it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.fusion.selectors import REFERENCE, SELECTORS
from kvtool.core.options.option import Option, options_of
from kvtool.core.query.options import QueryOptions

RATIOS = ("0.02", "0.05", "0.1", "0.15", "0.25", "0.5")
_HINT = "a run is MODE or MODE:AMOUNT, such as reuse, epic:16, blend:0.15 or union:5%"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A mode and how much it recomputes.

    Attributes
    ----------
    name : the same for every way to write the same run; results are kept under it.
    knob : the option that `amount` sets, such as `ratio`; "" where the mode has none.
    """

    mode: str
    knob: str = ""
    amount: float | None = None

    @property
    def name(self) -> str:
        return self.mode if self.amount is None else f"{self.mode}:{self.amount:.12g}"

    def options(self, base: QueryOptions) -> QueryOptions:
        """Put this run's mode and amount into the options `base`."""
        if self.amount is None:
            return replace(base, fusion=self.mode)
        changed: dict[str, Any] = {self.knob: self.amount}
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


def parse_run(text: str) -> RunSpec:
    """Read one run: `mode`, or `mode:amount`. The amount is a ratio (0 … 1, or in percent) or a number of tokens.

    Raises
    ------
    UsageError : no such mode, or an amount that the mode does not take.
    """
    mode, colon, amount = (part.strip() for part in text.partition(":"))
    if mode not in SELECTORS:
        raise UsageError(
            f"run {text!r}: there is no fusion mode {mode!r}",
            did_you_mean(mode, SELECTORS) or f"known: {', '.join(SELECTORS)}; {_HINT}",
        )
    knob = _knob(mode)
    if knob is None and colon:
        raise UsageError(f"run {text!r}: {mode} takes no amount", f"write {mode}")
    if knob is None:
        return RunSpec(mode)
    return RunSpec(mode, knob.name, knob.parse(amount, f"run {text!r}") if colon else knob.default)


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

    def place(name: str) -> tuple[int, float, str]:
        mode, _, amount = name.partition(":")
        return modes.index(mode) if mode in modes else len(modes), float(amount or 0), name

    return sorted(names, key=place)


def _knob(mode: str) -> Option | None:
    """Find the option of a query that says how much a mode recomputes."""
    knob = SELECTORS[mode].knob
    return options_of(QueryOptions)[knob] if knob else None
