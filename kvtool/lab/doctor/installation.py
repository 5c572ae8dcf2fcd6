"""Installed libraries, compared with the versions that kvtool was tested with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from kvtool import __version__
from kvtool.core.common.installing import extra_line, install_line
from kvtool.lab.doctor.finding import Finding, failing

_NOT_OFFERED = ("dev",)  # extras for work on kvtool itself


@failing("kvtool")
def check_kvtool() -> Iterator[Finding]:
    """Say which kvtool runs, and in which Python."""
    place = Path(__file__).resolve().parents[2]
    python = f"Python {platform.python_version()} at {sys.prefix}"
    yield Finding("kvtool", "ok", f"{__version__} at {place}, {python}, {platform.system()} {platform.machine()}")


@failing("libraries")
def check_libraries() -> Iterator[Finding]:
    """Look for every library that kvtool needs, in a version that it was tested with."""
    bad = [finding for wanted in _wanted() if (finding := _judged(wanted)) is not None]
    yield from bad
    if not bad:
        shown = ", ".join(f"{name} {_installed(name)}" for name in ("torch", "transformers", "numpy", "lmdb"))
        yield Finding("libraries", "ok", f"all {len(_wanted())} are there: {shown}, …")


@failing("extras")
def check_extras() -> Iterator[Finding]:
    """Say which extras are installed; one that is not is nothing bad."""
    for extra in sorted(set(metadata.metadata("kvtool").get_all("Provides-Extra") or ()) - {*_NOT_OFFERED}):
        wanted = _wanted(extra)
        if missing := [each.name for each in wanted if _installed(each.name) is None]:
            text, hint = f"not installed ({', '.join(missing)})", f"where it is wanted: {extra_line(extra)}"
            yield Finding(f"extra [{extra}]", "ok", text, hint)
        elif bad := [finding for each in wanted if (finding := _judged(each)) is not None]:
            yield from bad
        else:
            yield Finding(
                f"extra [{extra}]", "ok", ", ".join(f"{each.name} {_installed(each.name)}" for each in wanted)
            )


def _wanted(extra: str = "") -> list[Requirement]:
    """Return the requirements of an extra on this machine; without one, those of kvtool."""
    known = [Requirement(line) for line in metadata.requires("kvtool") or ()]
    if not extra:
        return [each for each in known if each.marker is None or each.marker.evaluate({"extra": ""})]
    mine = [each for each in known if each.marker is not None and each.marker.evaluate({"extra": extra})]
    return [each for each in mine if not each.marker or not each.marker.evaluate({"extra": ""})]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _judged(wanted: Requirement) -> Finding | None:
    """Return the finding about a missing or untested library, or None."""
    version, install = _installed(wanted.name), install_line(f"'{wanted.name}{wanted.specifier}'")
    if version is None:
        return Finding(wanted.name, "failed", f"{wanted.name} is not installed", install)
    if not wanted.specifier.contains(version, prereleases=True):
        text = f"{wanted.name} {version} is outside of what was tested ({wanted.specifier})"
        return Finding(wanted.name, "warning", text, install)
    return None
