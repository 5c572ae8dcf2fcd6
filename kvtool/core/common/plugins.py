"""Plugins of other packages, by entry points (packaging.python.org, "Entry points specification"), and commands that
install packages.

A plugin's name is known from the metadata of its package. Its code is imported when it is used, and what is wrong with
it concerns nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvtool.core.errors import KvtoolError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


Group = Literal["readers", "embedders", "selectors", "blobs"]
GROUPS: tuple[Group, ...] = get_args(Group)  # each as `kvtool.readers`, …
_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,30}")
AT_FAULT = "remove the package, or report it to its authors"
_troubles: dict[Plugin, PluginError] = {}  # plugins that were left out, and why


class PluginError(KvtoolError):
    """A plugin that was asked for cannot be used."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin of a package. `name`: a file ending without its dot, an embedder, a mode, or a URL's kind."""

    group: Group
    name: str
    package: str
    target: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"the plugin {self.name!r} of {self.package}"

    def load(self) -> Any:
        try:
            return self.entry.load()
        except Exception as error:
            raise self.broken(error) from error

    def broken(self, error: object) -> PluginError:
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        return PluginError(f"{self} ({self.target}) cannot be used: {why}", AT_FAULT)

    def leave_out(self, why: PluginError) -> None:
        _troubles.setdefault(self, why)


def found(group: Group, names: Container[str] = ()) -> Mapping[str, Plugin]:
    """Find the plugins of a group by name, without importing any. None takes the place of kvtool's own `names`."""
    named: dict[str, Plugin] = {}
    for plugin in _all()[group]:
        if not _NAME.fullmatch(plugin.name):
            plugin.leave_out(plugin.broken("its name is none"))
        elif plugin.name in names:
            plugin.leave_out(plugin.broken(f"{plugin.name!r} is kvtool's own"))
        elif (first := named.setdefault(plugin.name, plugin)) is not plugin:
            plugin.leave_out(plugin.broken(f"{first.package} has one of that name"))
    return named


def troubles() -> list[tuple[str, str]]:
    return [(error.message, error.hint) for error in _troubles.values()]


def listed() -> list[tuple[Plugin, str]]:
    """List all plugins, each with its problem or "": for that, all are imported."""
    rows = []
    for plugin in (plugin for group in GROUPS for plugin in _all()[group]):
        problem = _troubles[plugin].message if plugin in _troubles else ""
        try:
            plugin.load()
        except PluginError as error:
            problem = problem or error.message
        rows.append((plugin, problem))
    return rows


@cache
def _all() -> Mapping[Group, list[Plugin]]:
    plugins: dict[Group, list[Plugin]] = {group: [] for group in GROUPS}
    if not _is_any_named():
        return plugins
    from importlib.metadata import entry_points

    every = entry_points()
    for group in GROUPS:
        for entry in every.select(group=f"kvtool.{group}"):
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
            plugins[group].append(Plugin(group, entry.name, package, entry.value, entry))
        plugins[group].sort(key=lambda plugin: (plugin.package, plugin.name))
    return plugins


def _is_any_named() -> bool:
    """Return True if an installed package names kvtool in its entry points. Mostly none does: this scan takes 1.4 ms of
    processor time, which every command spends; the library would take 26 ms."""
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if not entry.name.endswith((".dist-info", ".egg-info")):
                    continue
                with suppress(OSError), open(os.path.join(entry.path, "entry_points.txt"), "rb") as file:
                    if b"[kvtool." in file.read():
                        return True
    return False


def install_line(*requirements: str) -> str:
    """Command that installs into kvtool's environment, which pipx or `uv tool` may own. `requirements`: quoted."""
    home = Path(sys.prefix)
    if (home / "pipx_metadata.json").is_file():
        command = f"pipx runpip {shlex.quote(home.name)} install"
    elif (home / "uv-receipt.toml").is_file():
        command = f"uv pip install --python {shlex.quote(sys.prefix)}"
    elif shutil.which("pip") == str(home / "bin" / "pip"):
        command = "pip install"
    else:  # the environment is not activated
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join((command, *requirements))


def extra_line(extra: str) -> str:
    return install_line(f"'kvtool[{extra}]'")
