"""Help that can be scanned: headings, examples, and no flag without a meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvtool.cli.app import COMMANDS, SHOWN, load_command, main
from kvtool.cli.commands import described


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    below = [name for name, each in getattr(command, "commands", {}).items() if not each.hidden]
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
    assert all(row.option for heading, rows in sections.items() if heading != "Arguments" for row in rows)
    assert len(command.examples) >= 2
    assert all(line == path or line.startswith(f"{path} ") for line in command.examples)
    shown = command.get_help(context)
    for line in command.examples:
        assert f"kvtool {line}" in " ".join(shown.split())


LARGE = [path for path, command in EVERY.items() if command.common]


def test_the_overview_lists_23_commands_in_their_own_words() -> None:
    shown = {name: line for rows in SHOWN.values() for name, line in rows.items()}
    assert len(shown) == 23
    for name, line in shown.items():
        if name.startswith("store "):
            assert EVERY[name].get_short_help_str(limit=200).rstrip(".") == line.rstrip(".")


@pytest.mark.parametrize("path", LARGE)
def test_the_help_of_a_large_command_fits_a_screen(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([path, "--help"]) == 0
    short = capsys.readouterr().out
    assert short.count("\n") <= 45
    assert max(map(len, short.splitlines())) <= 80
    assert main([path, "--help-all"]) == 0
    every = capsys.readouterr().out
    for option in EVERY[path].options.values():
        flag = option.flag.partition("/")[0]
        assert re.search(rf"^  {flag}(?![\w-])", every, re.MULTILINE)
        assert bool(re.search(rf"^  {flag}(?![\w-])", short, re.MULTILINE)) == (option.name in EVERY[path].common)


def test_the_flags_of_every_command_are_described_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"query", "ingest", "compress", "serve"} <= {*LARGE}
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for flag in ("--json", "--jsonl", "-q, --quiet", "-v, --verbose", "--config FILE"):
        assert f"\n  {flag} " in overview
        doctor = EVERY["doctor"]
        assert f"\n  {flag} " not in doctor.get_help(doctor.make_context("doctor", [], resilient_parsing=True))


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
    several = {flag for flag, kinds in meanings.items() if len(kinds) > 1}
    assert several <= {"--chunks", "--context", "--fusion", "--level", "--slo-ms"}
    assert "--profile" not in EVERY["query"].get_help(EVERY["query"].make_context("query", [], resilient_parsing=True))


@pytest.mark.parametrize("path", [path for path in EVERY if path.startswith("store ")])
def test_what_a_command_does_not_use_is_taken_and_not_shown(path: str) -> None:
    command = EVERY[path]
    shown = command.get_help(command.make_context(path, [], resilient_parsing=True))
    unused = ["--device", "--model", "--dtype", "--offline"]
    assert not [flag for flag in unused if flag in shown]
    given = command.make_context(path, ["--device", "cpu", "--offline"], resilient_parsing=True)
    assert given.params["device"] == "cpu"
