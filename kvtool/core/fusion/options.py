"""Options of fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.core.errors import UsageError
from kvtool.core.fusion.selectors import EXACTLY, FUSIONS, MODES, WEIGHED, parameters_of_mode, selector_class
from kvtool.core.options.option import Options, option

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector

FUSION, INSIDE = "Fusion", "Diagnostics"  # headings in the commands' help


@dataclass(frozen=True, kw_only=True)
class FusionOptions(Options, sections=("query",), group=FUSION):
    """The fusion mode and its parameters; `set` has those without a field, as `MODE.PARAMETER=VALUE`."""

    fusion: str | None = option(
        None,
        "How to combine the KV of the chunks: which tokens to recompute; see `kvtool help concepts`.",
        choices=FUSIONS,
        instead="union, or prefix for recurrent models",
        several="it takes one mode; `kvtool query QUESTION --compare MODE,MODE` compares several",
    )
    ratio: float = option(
        0.15,
        "Share of the cached tokens that blend, infoflow and union recompute.",
        unit="percentage",
        lowest=0,
        highest=1,
    )
    link_tokens: int = option(16, "Number of tokens that `epic` recomputes in every chunk.", lowest=0)
    link: str = option(
        "initial", "Position of the tokens that `epic` recomputes.", choices=("initial", "final", "boundary")
    )
    shift: bool = option(
        True,
        "Shift the reused KV of a chunk by the average change of its recomputed tokens.",
        flag="--shift/--no-shift",
    )
    set: tuple[str, ...] = option(
        (),
        "Set a parameter of a mode, of sampling, search or loading; see `kvtool help concepts`.",
        group=INSIDE,
        metavar="NAME=VALUE",
        pattern=r"[^=]+=.*",
        table=True,
    )

    def mode(self, keeps_states: bool = False) -> str:
        return self.fusion or (EXACTLY[0] if keeps_states else WEIGHED)


def selector_for(options: FusionOptions, mode: str) -> Selector:
    """Make the selector of a mode. Its parameters are the fields of `options` with their names, and those that
    `options.set` has as `MODE.PARAMETER=VALUE`. Raises UsageError: the mode is unknown; PluginError."""
    if mode not in MODES:
        raise UsageError(f"there is no fusion mode {mode!r}", f"known: {', '.join(MODES)}")
    kind = selector_class(mode)
    parameters = parameters_of_mode(mode)
    given = {name: getattr(options, name) for name in parameters if hasattr(options, name)}
    for pair in options.set:
        of, _, text = pair.partition("=")
        if of.startswith(f"{mode}."):
            parameter = parameters[of.removeprefix(f"{mode}.")]
            given[parameter.name] = parameter.parse(text, of)
    return kind(**given)
