"""Count the lines and files of a tree's product code by room, and the share of imports and docstrings.

    python samples/tools/lines.py [TREE ...]
    python samples/tools/lines.py --budgets

A tree is a checkout of the repository; the one that this script is in by default. The lines of `kvtool help design`.
`--budgets` prints each room's lines, as `LINES` in tests/test_rooms.py has them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(source: str) -> Counter[str]:
    """Lines by kind: `code`, `imports`, `docstrings`, `other` (blank, or only a comment)."""
    kinds: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), "imports")
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            kinds |= dict.fromkeys(range(text.lineno, (text.end_lineno or text.lineno) + 1), "docstrings")
    counts: Counter[str] = Counter()
    for number, line in enumerate(source.splitlines(), 1):
        bare = not line.strip() or line.strip().startswith("#")
        counts[kinds.get(number, "other" if bare else "code")] += 1
    return counts


def rooms_of(tree: Path) -> dict[str, list[Path]]:
    """Return the product's files by room: a package under `kvtool/core`, or another one."""
    package, rooms = tree / "kvtool", dict[str, list[Path]]()
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).parts
        depth = 2 if parts[0] == "core" else 1
        rooms.setdefault("/".join(parts[:depth]) if len(parts) > depth else "top", []).append(file)
    return rooms


def budgets(tree: Path) -> dict[str, int]:
    """Return the lines of each room by its name."""
    rooms = {room.rpartition("/")[2]: files for room, files in rooms_of(tree).items()}
    return {
        room: sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        for room, files in sorted(rooms.items())
    }


def main() -> None:
    if sys.argv[1:] == ["--budgets"]:
        print("LINES = {", *(f'    "{room}": {lines},' for room, lines in budgets(HERE).items()), "}", sep="\n")
        return
    print("| tree | room | files | lines | imports | docstrings |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tree in sys.argv[1:] or [str(HERE)]:
        rooms = rooms_of(Path(tree))
        for room, files in [*rooms.items(), ("all", [*chain(*rooms.values())])]:
            counts = sum((lines_of(file.read_text(encoding="utf-8")) for file in files), Counter[str]())
            shares = (f"{counts[kind] / max(counts.total(), 1):.0%}" for kind in ("imports", "docstrings"))
            print(f"| {tree} | {room} | {len(files)} | {counts.total():,} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
