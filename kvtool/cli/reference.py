"""The command reference, made from what the commands declare: `python -m kvtool.cli.reference` writes the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvtool.cli.app import COMMANDS, load_command

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
_EVERYWHERE = "Options"  # the group of options that name none
_HEAD = """\
# Command reference

Every command and every option, made from the program itself by `make docs`; `kvtool COMMAND --help` shows the same. A
value comes from, in this order: the flag, the variable behind "env", `./kvtool.toml`, the user's configuration file,
the default. What the words mean: [concepts](concepts.md); what `--json` prints: [JSON](json.md); exit codes:
[troubleshooting](troubleshooting.md).
"""


def reference() -> str:
    """The whole page, in Markdown."""
    sections = (section for name in COMMANDS for section in _sections(load_command(name), f"kvtool {name}"))
    return "\n".join([_HEAD, *sections])


def _sections(command: Any, path: str) -> Iterator[str]:
    """A command, and behind a group those below it."""
    below = getattr(command, "commands", {})
    yield f"## {path}\n"
    yield from _body(command, path)
    for name, child in below.items():
        yield from _sections(child, f"{path} {name}")


def _body(command: Any, path: str) -> Iterator[str]:
    from typer.core import TyperArgument

    context = command.make_context(path, [], resilient_parsing=True)
    if command.help:
        yield f"{_without_marks(command.help)}\n"
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    yield f"    {path} {usage}".rstrip() + "\n"
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if isinstance(parameter, TyperArgument)]
    options = [parameter for parameter in shown if parameter not in arguments]
    yield from _table("argument", arguments, context)
    for group in dict.fromkeys(_group(option) for option in options):
        yield from _table(group, [option for option in options if _group(option) == group], context)


def _group(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or _EVERYWHERE


def _table(head: str, parameters: Iterable[Any], context: Any) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in parameters]
    rows = [f"| `{_left(record[0])}` | {_cell(record[1])} |" for record in records if record]
    if rows:
        yield "\n".join([f"| {head} | |", "| --- | --- |", *rows]) + "\n"


def _left(text: str) -> str:
    """Names and what they take, without the parser's names of types."""
    return _cell(re.sub(r" <[^>]*>", "", text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _without_marks(text: str) -> str:
    """A command's own words; typer's mark for "leave the line breaks" goes."""
    return "\n".join(line.rstrip() for line in text.replace("\b", "").strip().splitlines())


def main() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
