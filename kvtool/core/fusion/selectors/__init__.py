"""The fusion modes, known without importing torch: a new one is a file here and a line below."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from kvtool.core.errors import UsageError

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector

SELECTORS: dict[str, type[Selector]]  # by mode

# The class of each mode; it stands in the module that is called as the mode.
MODES = {
    "full": "Full",
    "prefix": "Prefix",
    "reuse": "Reuse",
    "epic": "Epic",
    "blend": "Blend",
    "infoflow": "Infoflow",
    "union": "Union",
}
REFERENCE = "full"  # what all modes are measured against
EXACTLY = ("prefix", "full")  # what there is of a model that keeps states; the first is what a query takes
AUTO = "auto"  # no mode of its own: the controller weighs one that recomputes a share against those that lose nothing
WEIGHED = "union"  # that one
FUSIONS = (*MODES, AUTO)  # what `--fusion` takes

__all__ = ["AUTO", "EXACTLY", "FUSIONS", "MODES", "REFERENCE", "SELECTORS", "WEIGHED", "selector_for"]


def __getattr__(name: str) -> Any:
    """Import the selectors, and torch with them, only when they are asked for."""
    if name != "SELECTORS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["SELECTORS"] = {mode: _kind_of(mode) for mode in MODES}
    return made


def _kind_of(mode: str) -> type[Selector]:
    kind: type[Selector] = getattr(import_module(f"{__name__}.{mode}"), MODES[mode])
    return kind


def selector_for(options: object, mode: str) -> Selector:
    """The selector of a mode; its parameters are the attributes of `options` that have their names and are not None.

    Raises
    ------
    UsageError : no such mode.
    """
    if mode not in MODES:
        raise UsageError(f"there is no fusion mode {mode!r}", f"known: {', '.join(MODES)}")
    kind = _kind_of(mode)
    given = {field.name: getattr(options, field.name, None) for field in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in given.items() if value is not None})
