"""Registry of fusion modes, without importing torch: a new mode is a file here and a line below, or a plugin."""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtool.core.common.plugins import PluginError, found
from kvtool.core.options.option import Option, parameters_of

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector

SELECTORS: dict[str, type[Selector]]  # by mode

# Each in the module with its name; its class has that name, too.
_OWN = ("full", "prefix", "reuse", "epic", "blend", "infoflow", "union")
_PLUGINS = found("selectors", names=(*_OWN, "auto"))
MODES = (*_OWN, *_PLUGINS)
REFERENCE = "full"  # what all modes are measured against
EXACTLY = ("prefix", "full")  # the modes of a recurrent model; the first is the default
AUTO = "auto"  # the controller (query/auto.py) chooses between a mode that recomputes a share and the lossless ones
WEIGHED = "union"  # the mode that recomputes a share
FUSIONS = (*MODES, AUTO)  # what `--fusion` takes


def __getattr__(name: str) -> Any:
    """Import the selectors, and torch with them, only when they are asked for."""
    if name != "SELECTORS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    classes: dict[str, type[Selector]] = {mode: selector_class(mode) for mode in _OWN}
    for mode, plugin in _PLUGINS.items():
        try:
            classes[mode] = selector_class(mode)
        except PluginError as error:
            plugin.leave_out(error)
    globals()["SELECTORS"] = classes
    return classes


def selector_class(mode: str) -> type[Selector]:
    if mode in _OWN:
        kind: type[Selector] = getattr(import_module(f"{__name__}.{mode}"), mode.capitalize())
        return kind
    from kvtool.core.fusion.selectors.base import Selector

    plugin = _PLUGINS[mode]
    kind = plugin.load()
    if not (isinstance(kind, type) and issubclass(kind, Selector) and is_dataclass(kind)):
        raise plugin.broken("it is no dataclass that is a Selector")
    if getattr(kind, "name", "") != mode:
        raise plugin.broken(f"its class is called {getattr(kind, 'name', '')!r}")
    return kind


def parameters_of_mode(mode: str) -> dict[str, Option]:
    return parameters_of(selector_class(mode), mode)
