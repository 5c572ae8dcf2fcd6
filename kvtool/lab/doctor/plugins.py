"""Plugin checks: what other packages add to kvtool, and whether it can be used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from kvtool.core.common.plugins import AT_FAULT, Plugin, listed
from kvtool.lab.doctor.finding import Finding, failing

# Each looks for plugins of its kind when it is imported, and leaves out those that would take the place of its own.
_REGISTRIES = (
    *("kvtool.core.corpus.readers", "kvtool.core.retrieval.embed", "kvtool.core.fusion.selectors"),
    *("kvtool.core.codec.levels", "kvtool.core.remote.blobs"),
)


def all_plugins() -> list[tuple[Plugin, str]]:
    """All plugins, by kind, each with what is wrong with it, or nothing; all of them are imported."""
    for registry in _REGISTRIES:
        importlib.import_module(registry)
    return listed()


@failing("plugins")
def check_plugins() -> Iterator[Finding]:
    """Say what other packages add; one that is left out harms nothing else."""
    for plugin, problem in all_plugins():
        subject = f"plugin {plugin.name} ({plugin.group})"
        if problem:
            yield Finding(subject, "warning", problem, AT_FAULT)
        else:
            yield Finding(subject, "ok", f"of {plugin.package}")
