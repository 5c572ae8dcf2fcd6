"""Names that begin with an underscore are private to their file: no other file uses them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtool

PACKAGE = Path(kvtool.__file__).parent


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that a file imports from kvtool, or takes from anything but `self`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            yield node.lineno, node.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtool"):
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_no_file_reaches_into_another_ones_private_members() -> None:
    own, used = {}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE), ast.parse(path.read_text("utf-8"))
        own[name] = {each for each in own_names(tree) if is_private(each)}
        used[name] = [(line, each) for line, each in used_names(tree) if is_private(each)]
    private = set().union(*own.values()) - {"_replace"}  # other libraries have their own; this one is of named tuples
    reached = [
        f"{path}:{line} {name}" for path, places in used.items() for line, name in places if name in private - own[path]
    ]
    assert reached == []
