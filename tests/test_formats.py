"""Tensors that kvtool makes say their format: the default is one a process, and a model being loaded changes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtool

OF_FLOATS = {"empty", "zeros", "ones", "rand", "randn", "linspace", "logspace", "eye"}


def unsaid(path: Path) -> Iterator[str]:
    """Calls that take torch's default. Machine code that writes float32 there would write beyond the end."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and (node.func.attr in OF_FLOATS or (node.func.attr == "full" and "nan" in ast.unparse(node)))
            and not any(keyword.arg == "dtype" for keyword in node.keywords)
        ):
            yield f"{path}:{node.lineno}"


def test_every_tensor_says_its_format() -> None:
    files = sorted((Path(kvtool.__file__).parent / "core").rglob("*.py"))
    assert [place for path in files for place in unsaid(path)] == []
