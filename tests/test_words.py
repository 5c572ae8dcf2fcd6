"""First words of docstrings: a function's is a verb, a class's or a module's a noun. Questions and pronouns fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtool
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
