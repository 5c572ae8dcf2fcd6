"""The quick tier of the tests leaves nothing out that only a long one would catch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers
from tests.tiers import LAYOUTS

TESTS = Path(__file__).parent
FAMILIES = {*LAYOUTS, "mistral", "gemma2"}
MODES = {"reuse", "epic", "union", "blend", "full", "prefix"}


class Item:
    """The parts of a test case that decide its tier."""

    def __init__(self, function: str, indices: dict[str, int], marks: dict[str, Any], **params: Any) -> None:
        self.nodeid = f"tests/laws/test_one.py::{function}[{'-'.join(map(str, params.values()))}]"
        self.path = Path("tests/laws/test_one.py")
        self.callspec = SimpleNamespace(params=params, indices=indices)
        self.marks = dict(marks)

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark.mark


def cases(function: str, marks: dict[str, Any], **values: Any) -> list[Any]:
    """Every combination of two parameters."""
    (one, first), (other, second) = values.items()
    return [
        Item(function, {one: i, other: j}, marks, **{one: x, other: y})
        for i, x in enumerate(first)
        for j, y in enumerate(second)
    ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_names", lambda module, *tables: MODES if "SELECTORS" in tables else FAMILIES)


def quick(items: list[Any]) -> list[dict[str, Any]]:
    tiers.assign(items)
    return [item.callspec.params for item in items if "slow" not in item.marks]


@pytest.mark.usefixtures("names")
def test_one_family_for_each_layout_with_every_mode() -> None:
    kept = quick(cases("test_law", {}, family=sorted(FAMILIES), mode=sorted(MODES)))
    assert {(one["family"], one["mode"]) for one in kept} == {(name, mode) for name in LAYOUTS for mode in MODES}


@pytest.mark.usefixtures("names")
def test_all_families_where_that_is_asked_for() -> None:
    marks = {"every_family": pytest.mark.every_family.mark}
    kept = quick(cases("test_law", marks, family=sorted(FAMILIES), mode=sorted(MODES)))
    assert {one["family"] for one in kept} == FAMILIES
    assert {one["mode"] for one in kept if one["family"] == "mistral"} == set(tiers.COMMON)
    pairs = [(name, dtype) for name in sorted(FAMILIES) for dtype in ("float32", "bfloat16")]
    found = {pair for one in quick(cases("test_law", marks, case=pairs, again=[0])) for pair in [one["case"]]}
    assert found == {(name, dtype) for name, dtype in pairs if name in LAYOUTS or dtype == "float32"}


@pytest.mark.usefixtures("names")
def test_each_value_of_other_parameters() -> None:
    kept = quick(cases("test_it", {}, size=range(7), bits=range(3)))
    assert len(kept) == 7
    assert {one["size"] for one in kept} == set(range(7))
    assert {one["bits"] for one in kept} == set(range(3))


@pytest.mark.usefixtures("names")
def test_defects_in_full_and_some_by_number() -> None:
    broken = {"family": ["gemma2", "mistral"], "mode": sorted(MODES)}
    assert len(quick(cases("test_it_is_caught", {}, **broken))) == 2 * len(MODES)
    assert len(quick(cases("test_it", {"some": pytest.mark.some(3).mark}, size=range(6), bits=range(4)))) == 3


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
