"""Count the lines of a tree's product code by what they are: code, imports, docstrings, blank lines and comments.

    python samples/tools/lines.py [TREE ...]

A tree is a checkout of the repository; the one that this script is in by default. The lines of kvtool/docs/design.md.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(source: str) -> Counter[str]:
    """Lines by kind: `code`, `imports`, `docstrings`, `other` (blank, or a comment alone)."""
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


def main() -> None:
    for tree in sys.argv[1:] or [str(Path(__file__).resolve().parents[2])]:
        files = sorted(Path(tree, "kvtool").rglob("*.py"))
        counts = sum((lines_of(file.read_text(encoding="utf-8")) for file in files), Counter[str]())
        told = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("code", "imports", "docstrings", "other"))
        print(f"{tree}: {told}; {counts.total():,} lines in {len(files)} files")


if __name__ == "__main__":
    main()
