"""A group of commands that are imported one by one, as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import typer.core

from kvtool.cli.commands import Group


class LazyGroup(Group):
    """Lists stand-ins with a name and a line of help, and loads the one command that is invoked or completed.

    Attributes
    ----------
    lines : a line of help by name.
    """

    lines: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, line in self.lines.items():
            self.add_command(typer.core.TyperCommand(name, help=line, rich_markup_mode=None))

    def load(self, name: str) -> Any:
        """Import a command and build it."""
        raise NotImplementedError

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the named command as usual, then put the real one in its place."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if name and stand_in else None, rest
