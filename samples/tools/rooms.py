"""Draw which rooms of kvtool import which: rooms in their order, arrows that point down it, arrows that do not.

    python samples/tools/rooms.py OUT.svg [--package kvtool] [--order cli,bench,…,errors]

The order is that of `tests/test_rooms.py`, its last room at the top. Single modules in `kvtool/core` that have
no place in it are one room, "loose files". Every import counts, also one inside a function.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LOOSE = "loose files"
ROW, TOP, MIDDLE, WIDTH, BOX = 34, 54, 420, 840, 120  # pixels
DOWN, WRONG = "#4a7ab0", "#d0342c"

Arrows = Counter[tuple[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the figure, an SVG file")
    parser.add_argument("--package", type=Path, default=Path("kvtool"), help="the package's folder (default kvtool)")
    parser.add_argument("--order", help="rooms from top to bottom; default: that of tests/test_rooms.py")
    options = parser.parse_args()
    order = options.order.split(",") if options.order else tested_order()
    arrows = imports(options.package, set(order))
    used = {room for pair in arrows for room in pair}
    options.out.write_text(figure([room for room in order if room in used], arrows), encoding="utf-8")
    wrong = sorted(pair for pair in arrows if order.index(pair[0]) > order.index(pair[1]))
    print(f"{len(arrows)} arrows, {len(wrong)} against the order: {', '.join(f'{a} → {b}' for a, b in wrong)}")


def tested_order() -> list[str]:
    from tests.test_rooms import ORDER

    return [*reversed(ORDER)]


def imports(package: Path, rooms: set[str]) -> Arrows:
    """Count the imports from one room to another."""
    arrows: Arrows = Counter()
    for path in sorted(package.rglob("*.py")):
        here = room_of(("kvtool", *path.relative_to(package).with_suffix("").parts), rooms)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported(node):
                there = room_of(tuple(name.split(".")), rooms)
                if here and there and here != there:
                    arrows[here, there] += 1
    return arrows


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("kvtool.")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtool"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def room_of(parts: tuple[str, ...], rooms: set[str]) -> str:
    """The room of a module, such as ("kvtool", "core", "cache", "store"); "" for the package's own files."""
    inner = parts[1:] if parts[1:2] != ("core",) else parts[2:]
    if not inner or inner[0].startswith("__"):
        return ""
    if inner[0] in rooms:
        return inner[0]
    return LOOSE if parts[1:2] == ("core",) else ""


# ---- drawing -----------------------------------------------------------------------------------------------------


def figure(order: list[str], arrows: Arrows) -> str:
    rows = {room: TOP + number * ROW for number, room in enumerate(order)}
    wrong = sum(rows[here] > rows[there] for here, there in arrows)
    sides = f"{len(arrows) - wrong} down the order (right), {wrong} against it (left)"
    title = f"{len(order)} rooms, {len(arrows)} arrows: {sides}"
    height = TOP + len(order) * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *(marker(name, colour) for name, colour in (("down", DOWN), ("wrong", WRONG))),
            f'<text x="{MIDDLE}" y="24" text-anchor="middle">{escape(title)}</text>',
            *(arc(rows[here], rows[there], count) for (here, there), count in sorted(arrows.items())),
            *(box(room, at) for room, at in rows.items()),
            "</svg>\n",
        ]
    )


def marker(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto" '
        f'markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


def arc(start: int, end: int, count: int) -> str:
    """Return one arrow next to the column of rooms; the more imports, the thicker."""
    down = end > start
    side = 1 if down else -1
    edge = MIDDLE + side * BOX // 2
    reach = edge + side * (14 + 0.46 * abs(end - start))
    name, colour = ("down", DOWN) if down else ("wrong", WRONG)
    return (
        f'<path d="M{edge} {start}C{reach:.0f} {start} {reach:.0f} {end} {edge} {end}" fill="none" stroke="{colour}" '
        f'stroke-opacity="0.6" stroke-width="{min(4.0, 0.6 + count / 12):.1f}" marker-end="url(#{name})"/>'
    )


def box(room: str, at: int) -> str:
    left, top = MIDDLE - BOX // 2, at - 11
    return (
        f'<rect x="{left}" y="{top}" width="{BOX}" height="22" rx="4" fill="#f3f3f3" stroke="#999"/>'
        f'<text x="{MIDDLE}" y="{at + 4}" text-anchor="middle">{escape(room)}</text>'
    )


if __name__ == "__main__":
    main()
