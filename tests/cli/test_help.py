"""`kvtool help`: the pages in the package, and the reference that is made from the commands."""

from __future__ import annotations

import json
import re

import pytest

from kvtool.cli.app import main
from kvtool.cli.help import _PAGE_LINK, TOPICS, page
from kvtool.cli.out import SCHEMA, Out
from samples.tools import reference
from tests.cli.working import kvtool

Capture = pytest.CaptureFixture[str]


def test_without_a_topic_all_pages_are_listed_with_a_line_each(capsys: Capture) -> None:
    assert main(["help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}" in out and line in out for name, line in TOPICS.items())


@pytest.mark.parametrize("name", TOPICS)
def test_a_page_names_other_pages_by_their_commands_in_a_pipe(name: str, capsys: Capture) -> None:
    assert main(["help", name]) == 0
    out = capsys.readouterr().out
    assert out == _PAGE_LINK.sub(r"\1 (`kvtool help \2`)", page(name)).rstrip("\n") + "\n"
    assert not re.search(r"\]\([^)]*\.md", out)


def test_a_page_as_json(capsys: Capture) -> None:
    assert main(["help", "cron", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": SCHEMA, "topic": "cron", "text": page("cron")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("conceps", "hint: did you mean 'concepts'?"),
        ("weather", "hint: `kvtool help` lists them"),
        ("rm", "no page 'rm'\nhint: did you mean `kvtool store rm --help`?"),
        *(("store ls", "hint: `kvtool store ls --help`"), ("cron ls", "hint: ")),
    ],
)
def test_an_unknown_topic_is_a_usage_error_with_a_way_out(words: str, said: str) -> None:
    kvtool("help", *words.split()).failed(2, said)


def test_examples_fit_a_terminal() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    examples = [line.strip() for line in page.splitlines() if line.startswith("    kvtool ")]
    assert [line for line in examples if len(f"  {line}") > 80] == []


def test_a_terminal_gets_the_page_drawn(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Out()
    monkeypatch.setattr(out._stdout, "isatty", lambda: True)
    out.markdown("# Title\n\nSee **cron**.")
    drawn = capsys.readouterr().out
    assert "\x1b[" in drawn
    assert "#" not in drawn.split()


def test_the_reference_is_that_of_the_commands() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.reference(), "run `make docs`"
