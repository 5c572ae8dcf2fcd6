"""The quick tier of the tests leaves nothing out that only a long one would catch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in sorted(TESTS.glob("*/**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path, node


def is_slow(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)


def test_every_mutant_is_caught_by_a_quick_test() -> None:
    made = {node.name for node in ast.parse((TESTS / "laws/mutants.py").read_text()).body if hasattr(node, "name")}
    caught = {
        name.attr
        for _, test in functions()
        if test.name.endswith("_is_caught") and not is_slow(test)
        for name in ast.walk(test)
        if isinstance(name, ast.Attribute) and ast.unparse(name.value) == "mutants"
    }
    assert {name for name in made if not name.startswith("_")} - caught == set()


def test_every_folder_has_quick_tests() -> None:
    folders = {path.parent for path, _ in functions()}
    assert {path.parent for path, test in functions() if not is_slow(test)} == folders


def test_cases_of_a_file_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@test_tiers")
