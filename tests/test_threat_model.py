"""The threat model's table of trust: each line names tests, and these exist."""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[str]:
    page = files("kvtool").joinpath("docs/internals/threat-model.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Who is trusted with what\n")
    section, _, _ = section.partition("\n## ")
    table = [line for line in section.splitlines() if line.startswith("|")]
    return table[2:]


def test_every_party_has_its_rows() -> None:
    parties = {row.split("|")[1].strip() for row in rows()}
    wanted = ("pack", "shared store", "signer", "client", "another client", "document", "model folder")
    assert [party for party in wanted if not any(party in name for name in parties)] == []


@pytest.mark.parametrize("row", rows())
def test_each_line_is_held_by_tests_that_are_there(row: str) -> None:
    named = _NAMED.findall(row)
    assert named, row
    for path, name in named:
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert any(one.startswith("test_") for one in functions), path
        assert not name or name in functions, (path, name)
