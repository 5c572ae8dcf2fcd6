"""Choice of the cases that run in `make test`, in `make test-all`, and only in `make nightly`.

`make test` leaves out what is marked `slow`: by hand, where a single case takes long, or here, where the cases of one
function are many. Of those a covering array stays:

- Cases over families of models: the families of `LAYOUTS`, one for each layout of layers, with every mode and dtype. A
  test marked `every_family` (the first law) runs over all families in float32, with `union`.
- Other cases of two parameters and more: each value of each parameter at least once.
- A test of a defect (`..._is_caught`) runs in full, for a law that is not shown to fail may hold for nothing; so does a
  test of few cases.
- A test marked `some(count)` runs with so many of its cases, at even distances.

Of the others, `make test-all` takes `MOST` of a function, at even distances; the rest is marked `nightly`, too.

Cases of a family are a group for `--dist loadgroup`: one worker builds the model. All others are grouped by file, so
that one worker builds what its tests share; the slow ones are not grouped, since they are few and long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

LAYOUTS = {
    "gpt-neox": "multi-head attention",
    "llama": "grouped queries",
    "minicpm3": "latents",
    "gemma3": "sliding windows",
    "qwen3-next": "recurrent states beside attention",
    "mixtral": "a mixture of experts",
}
NARROW = ("bfloat16", "float16")
FEW = 6  # cases that all run
MOST = 3  # further cases of a function before a release


def assign(items: list[pytest.Item]) -> None:
    """Mark each case with its tier and its group."""
    items.sort(key=lambda item: item.path.stem != "test_wheel")  # a minute of installing: others run meanwhile
    known = _names("tests.families", "FAMILIES", "HYBRIDS") | _names("tests.wrappers", "WRAPPERS", "HYBRID_WRAPPERS")
    modes = _names("kvtool.core.fusion.selectors", "SELECTORS")
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(_function(item), []).append(item)
    for cases in functions.values():
        families = [_family(item, known) for item in cases]
        fast = set(map(id, _fast(cases, families, modes)))
        others = [item for item in cases if id(item) not in fast]
        for item in others:
            item.add_marker(pytest.mark.slow)
        chosen = set(map(id, others[:: -(-len(others) // MOST)] if others else ()))
        for item, family in zip(cases, families, strict=True):
            if id(item) not in fast | chosen:
                item.add_marker(pytest.mark.nightly)
            if family or not item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.xdist_group(family or item.path.stem))


def _fast(cases: list[pytest.Item], families: list[str], modes: set[str]) -> list[pytest.Item]:
    if some := cases[0].get_closest_marker("some"):
        return cases[:: -(-len(cases) // some.args[0])]
    if len(cases) <= FEW or _function(cases[0]).endswith("_is_caught"):
        return cases
    return _over_families(cases, families, modes) if any(families) else _over_values(cases)


def _over_families(cases: list[pytest.Item], families: list[str], modes: set[str]) -> list[pytest.Item]:
    """Those of the layouts, and of all families where a test asks for it; of its first family if it has no other."""
    chosen = [item for item, family in zip(cases, families, strict=True) if family in LAYOUTS]
    if cases[0].get_closest_marker("every_family"):
        plain = [item for item in cases if _words_of(item).isdisjoint(NARROW)]
        chosen += [item for item in plain if _words_of(item) & modes <= {"union"}]
    return chosen or [item for item, family in zip(cases, families, strict=True) if family == families[0]]


def _over_values(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases in which each value of each parameter occurs, those first that bring the most new ones."""
    values = {id(item): {(name, index) for name, index in _spec(item).indices.items()} for item in cases}
    missing: set[tuple[str, int]] = set().union(*values.values())
    chosen: list[pytest.Item] = []
    while missing:
        chosen.append(max(cases, key=lambda item: len(values[id(item)] & missing)))
        missing -= values[id(chosen[-1])]
    return chosen


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def _family(item: pytest.Item, known: set[str]) -> str:
    return min(_words_of(item) & known, default="")


def _spec(item: pytest.Item) -> Any:
    return getattr(item, "callspec", None)


def _words_of(item: pytest.Item) -> set[str]:
    spec = _spec(item)
    return set(_words(spec.params.values())) if spec else set()


def _words(values: Any) -> Iterator[str]:
    """Strings and dtypes among parameters, those in tuples of them included."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _words(value)
        elif isinstance(value, str) or type(value).__name__ == "dtype":
            yield str(value).removeprefix("torch.")


def _names(module: str, *tables: str) -> set[str]:
    """Names in a module that some test has imported; no other test can be parametrised by them."""
    loaded = sys.modules.get(module)
    return {name for table in tables for name in getattr(loaded, table, ())}
