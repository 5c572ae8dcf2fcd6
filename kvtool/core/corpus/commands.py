"""Formats that a command of the user's reads, as they are given: `ending=command`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvtool.core.errors import UsageError

PATH = "{}"  # what stands for the file in a command


def commands_of(written: Sequence[str]) -> dict[str, str]:
    """Commands by file ending, of `ending=command`.

    Raises
    ------
    UsageError : an ending is given twice.
    """
    commands: dict[str, str] = {}
    for each in written:
        ending, _, command = each.partition("=")
        key = "." + ending.strip().lower().removeprefix(".")
        if key in commands:
            raise UsageError(f"two commands read {key} files", "keep one of them")
        commands[key] = command.strip()
    return commands


def complaint(written: str) -> str:
    """Return the error in `ending=command`; empty if it is valid."""
    ending, sign, command = written.partition("=")
    if not sign or not ending.strip(". ") or set(ending) & set("/\\*? "):
        return "is no `ending=command`, such as `djvu=djvutxt {}`"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"is no command: {error}".lower()
    return "" if any(PATH in word for word in words[1:]) else f"has no {PATH}, which stands for the file"
