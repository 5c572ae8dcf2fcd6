from __future__ import annotations

import ast
from pathlib import Path

import kvtool

CORE = Path(kvtool.__file__).parent / "core"
ROOMS = "model fusion kernels session records checkpoint codec cache native common options".split()
NO_NOUNS = frozenset(
    "one found wanted own known made kept some what those asked held begun said place turn room".split()
)
LIMIT = 119  # a commit may only lower it


def test_values_are_named_by_nouns() -> None:
    """A value is named by a noun; the number of names and parameters that are pronouns or participles only falls."""
    paths = [path for room in ROOMS for path in (CORE / room).rglob("*.py")]
    names = [name for path in paths for name in _names(ast.parse(path.read_text("utf-8")))]
    assert sum(name in NO_NOUNS for name in names) <= LIMIT


def _names(tree: ast.Module) -> list[str]:
    nodes = list(ast.walk(tree))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return stored + [node.arg for node in nodes if isinstance(node, ast.arg)]
