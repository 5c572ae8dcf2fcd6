"""Rooms stand in one order, and imports point down it (the picture is in kvtool/docs/design.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvtool

PACKAGE = Path(kvtool.__file__).parent

# A room may import whatever stands above it in this list, and nothing below.
ORDER = (
    *("errors", "common", "options", "codec", "model", "corpus", "streaming", "cache", "records", "fusion"),
    *("retrieval", "session", "evaluate", "upkeep", "remote", "ingest", "compress", "fit", "query", "pack"),
    *("api", "lab", "cli"),
)
# Rooms of one floor: none of them imports another.
APART = ({"ingest", "compress", "fit", "query", "pack"}, {"codec", "model", "corpus", "streaming"})
# What is still wrong: it may only become less.
KNOWN: set[tuple[str, str]] = set()


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module given by its parts, such as ("kvtool", "core", "cache", "store")."""
    if parts[1:2] == ("core",):
        return parts[2] if len(parts) > 2 else "top"
    return parts[1] if len(parts) > 1 and parts[1] in ("cli", "lab") else "top"


def imports() -> Iterator[tuple[Path, str, str]]:
    """Every import of kvtool's own, wherever it stands: the file, its room, the imported room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        here = room_of(("kvtool", *path.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for name in _names(node):
                there = room_of(tuple(name.split(".")))
                if "top" not in (here, there) and here != there:
                    yield path, here, there


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("kvtool.")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtool"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_every_room_has_its_place() -> None:
    assert {room for _, *both in imports() for room in both} <= {*ORDER}


def test_imports_point_one_way() -> None:
    wrong = {}
    for path, here, there in imports():
        level = ORDER.index(there) < ORDER.index(here)
        apart = any({here, there} <= floor for floor in APART)
        if not level or apart:
            wrong.setdefault((here, there), set()).add(path.name)
    assert {pair: files for pair, files in wrong.items() if pair not in KNOWN} == {}
    assert set(wrong) >= KNOWN, "solved: take it out of KNOWN"
