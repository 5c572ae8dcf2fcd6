"""Help that can be scanned: headings, examples, and no flag without a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvtool.cli.app import COMMANDS, load_command
from kvtool.cli.commands import described


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    below = list(getattr(command, "commands", {}))
    if not below:
        yield path, command
    context = command.make_context(path, [], resilient_parsing=True)
    for name in below:
        yield from commands(command.resolve_command(context, [name])[1], f"{path} {name}")


EVERY = {path: command for name in COMMANDS if name != "help" for path, command in commands(load_command(name), name)}


@pytest.mark.parametrize("path", EVERY)
def test_options_stand_under_headings_behind_two_examples(path: str) -> None:
    command = EVERY[path]
    context = command.make_context(path, [], resilient_parsing=True)
    sections = described(command, context)
    assert "Options" not in sections
    assert list(sections)[-1] == "Output"
    assert len(command.examples) >= 2
    assert all(line == path or line.startswith(f"{path} ") for line in command.examples)
    shown = command.get_help(context)
    for line in command.examples:
        assert f"kvtool {line}" in " ".join(shown.split())


@pytest.mark.parametrize("path", EVERY)
def test_the_examples_are_command_lines(path: str) -> None:
    import shlex

    for line in EVERY[path].examples:
        EVERY[path].make_context(path, shlex.split(line)[len(path.split()) :], resilient_parsing=False)


def test_one_flag_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for command in EVERY.values():
        for option in command.options.values():
            meanings.setdefault(option.flag, set()).add(option.unit or option.kind.__name__)
    assert {flag for flag, kinds in meanings.items() if len(kinds) > 1} <= {
        "--chunks",
        "--context",
        "--fusion",
        "--level",
        "--slo-ms",
    }
    assert "--profile" not in EVERY["query"].get_help(EVERY["query"].make_context("query", [], resilient_parsing=True))


@pytest.mark.parametrize("path", [path for path in EVERY if path.startswith("store ")])
def test_what_a_command_does_not_use_is_taken_and_not_shown(path: str) -> None:
    command = EVERY[path]
    shown = command.get_help(command.make_context(path, [], resilient_parsing=True))
    unused = ["--device", "--model", "--dtype"]
    if path != "store warm":  # which finds chunks for questions, by vectors of a model that may have to be fetched
        unused.append("--offline")
    assert not [flag for flag in unused if flag in shown]
    given = command.make_context(path, ["--device", "cpu", "--offline"], resilient_parsing=True)
    assert given.params["device"] == "cpu"
