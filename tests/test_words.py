"""Words of docstrings, documentation and help: the first is a verb or a noun, and none is banned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtool
from samples.tools import words
from tests.test_rooms import room_of

PACKAGE = Path(kvtool.__file__).parent
BANNED = {"What", "Whether", "How", "Where", "Which", "Who", "It", "One", "Those", "Of"}


def offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each docstring that begins with a banned word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0].strip("*`'\",.:;") in BANNED:
                yield node.body[0].lineno, words[0]


def found() -> dict[str, list[str]]:
    """Return the offences of the package by room, as `file:line: word`."""
    rooms: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent)
        lines = [f"{name}:{line}: {word}" for line, word in offences(ast.parse(path.read_text(encoding="utf-8")))]
        if lines:
            rooms.setdefault(room_of(name.with_suffix("").parts), []).extend(lines)
    return rooms


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [line for lines in found().values() for line in lines] == []


def test_a_banned_word_is_found() -> None:
    tree = ast.parse('"""Words."""\nclass A:\n    """*What* it is."""\n    async def f(self):\n        """Of a."""\n')
    assert [*offences(tree)] == [(3, "*What*"), (5, "Of")]


HELD = {name: text for name, text in words.pages().items() if not name.startswith(("CHANGELOG", "samples"))}


def test_documentation_and_help_use_no_banned_word() -> None:
    texts = HELD | words.generated_help()
    assert {"README.md", "CONTRIBUTING.md", "kvtool/docs/concepts.md", "help", "kvtool --help"} <= {*texts}
    assert [(name, *offence) for name, text in texts.items() for offence in words.offences(text)] == []


def test_documentation_and_help_use_no_term_that_the_glossary_has_replaced() -> None:
    glossary = HELD["kvtool/docs/glossary.md"]
    for term in words.OLD_TERMS.values():
        assert f"| {term}" in glossary, f"{term} is no term of the glossary"
    texts = HELD | words.generated_help()
    found = [(name, *each) for name, text in texts.items() for each in words.offences(text, words.OLD_TERMS)]
    assert found == []


def test_the_lint_reads_prose_and_no_code() -> None:
    text = (
        "It stands `behind` it.\n\n    kvtool tells\n\n| a | lies there |\nStands for x; a room of core; no room for y."
    )
    assert [word for word, _ in words.offences(text)] == ["stands", "lies", "no room"]
    assert words.advice("No room") == "space, memory"
