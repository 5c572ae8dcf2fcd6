"""Write the command reference, made from what the commands declare.

python samples/tools/reference.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.cli.app import COMMANDS, load_command
from kvtool.cli.commands import Described, LazyGroup, described, everywhere
from kvtool.cli.options import ANYWHERE, described_option
from kvtool.core.options.option import Option, options_of

PAGE = Path(__file__).resolve().parents[2] / "kvtool" / "docs" / "reference" / "reference.md"
_HEAD = """\
# Command reference

Every command and every option, made from the program itself by `make docs`; `kvtool COMMAND --help-all` shows the
same. A value comes from, in this order: the flag, the variable, `./kvtool.toml` and the user's configuration file
(where a key is the variable in small letters without `KVTOOL_`, or in a command's own table the flag with
underscores), the default. Terms: [concepts](../guide/concepts.md); what `--json` prints: [JSON](json.md); exit codes:
[troubleshooting](../guide/troubleshooting.md).
"""


_JOINED = (  # commands with almost the same options, in one section
    ("kvtool ps", "kvtool stop"),
    ("kvtool inspect", "kvtool inspect audit", "kvtool inspect gate"),
    ("kvtool inspect deviation", "kvtool inspect sparsity"),
    ("kvtool store push", "kvtool store pull"),
)


def reference() -> str:
    shared = [each for source in ANYWHERE for each in options_of(source).values() if each.flag]
    rows = [
        Described((f"{each.flag.replace('/', ' / ')} {each.metavar}".rstrip(), described_option(each)), each)
        for each in shared
    ]
    pieces = [_HEAD, *_table("Options of every command", [*(Described(row) for row in everywhere()), *rows])]
    commands: dict[str, tuple[Any, Any]] = {}
    for name in COMMANDS:
        commands.update(_commands(load_command(name), f"kvtool {name}"))
    first_of = {path: group[0] for group in _JOINED for path in group}
    for path in commands:
        if first_of.get(path, path) == path:
            group = next((group for group in _JOINED if group[0] == path), (path,))
            pieces += _section({each: commands[each] for each in group})
    return "\n".join(pieces)


def _commands(command: Any, path: str, group: Any = None) -> Iterator[tuple[str, tuple[Any, Any]]]:
    context = command.make_context(path, [], parent=group, resilient_parsing=True)
    children = getattr(command, "commands", {})
    if not children or described(command, context):
        yield path, (command, context)
    for name, child in children.items():
        if child.hidden:
            continue
        known = command.load(name) if isinstance(command, LazyGroup) else child
        yield from _commands(known, f"{path} {name}", context)


def _section(commands: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    yield f"## {', '.join(commands)}\n"
    takers: dict[str, dict[tuple[str, str], list[str]]] = {}
    rows: dict[tuple[str, str], Described] = {}
    for path, (command, context) in commands.items():
        yield f"{_without_marks(command.help)}\n"
        usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
        lines = dict.fromkeys(
            [f"{path} {usage}".rstrip(), *(f"kvtool {line}" for line in getattr(command, "examples", ()))]
        )
        yield "\n".join(f"    {line}" for line in lines) + "\n"
        for heading, described_rows in described(command, context).items():
            for row in described_rows:
                if row.option is None or not _is_shared(row.option):
                    rows[row.record] = row
                    takers.setdefault(heading, {}).setdefault(row.record, []).append(path)
    for heading, records in takers.items():
        yield from _table(heading, [_limited(rows[each], who, len(commands)) for each, who in records.items()])


def _limited(row: Described, takers: Sequence[str], count: int) -> Described:
    if len(takers) == count:
        return row
    return Described((row.record[0], f"`{takers[0].rpartition(' ')[2]}`: {row.record[1]}"), row.option)


def _is_shared(option: Option) -> bool:
    return any(option == each for source in ANYWHERE for each in options_of(source).values())


def _table(heading: str, rows: Iterable[Described]) -> Iterator[str]:
    cells = [(f"`{_cell(row.record[0])}`", _cell(row.record[1]), _setting(row)) for row in rows]
    if any(setting for *_, setting in cells):
        yield "\n".join([f"| {heading} | | variable |", "| --- | --- | --- |", *map(_row, cells)]) + "\n"
    else:
        yield "\n".join([f"| {heading} | |", "| --- | --- |", *(_row(cell[:2]) for cell in cells)]) + "\n"


def _setting(row: Described) -> str:
    return f"`{row.option.env}`" if row.option and row.option.setting else ""


def _row(cells: Iterable[str]) -> str:
    return "".join(f"| {cell} " for cell in cells) + "|"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _without_marks(text: str) -> str:
    """A command's own words; typer's mark for "leave the line breaks" is removed."""
    return "\n".join(line.rstrip() for line in text.replace("\b", "").strip().splitlines())


def main() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
