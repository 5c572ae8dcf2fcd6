"""Rooms have one order, and imports point down it (the picture is in `kvtool help design`)."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import kvtool

PACKAGE = Path(kvtool.__file__).parent

# A room may import the rooms above it in this list, and none below.
ORDER = (
    *(
        "errors",
        "common",
        "options",
        "native",
        "kernels",
        "checkpoint",
        "codec",
        "model",
        "corpus",
        "streaming",
        "cache",
        "records",
    ),
    *("fusion", "retrieval", "session", "evaluate", "upkeep", "remote", "ingest", "compress", "query"),
    *("api", "agent", "serve", "vllm", "reports", "cli"),
)
# Rooms of one floor: none of them imports another.
APART = ({"ingest", "compress", "query"}, {"codec", "model", "corpus", "streaming"})
# The most lines that each room, the product and the tests may have. A commit may lower a number; it may raise one by
# the lines of an addition (`CONTRIBUTING.md` lists the kinds), or by lowering another as much.
LINES = {
    "agent": 614,
    "api": 429,
    "cache": 4352,
    "checkpoint": 2895,
    "cli": 4618,
    "codec": 3402,
    "common": 1089,
    "compress": 1159,
    "corpus": 6110,
    "errors": 130,
    "evaluate": 269,
    "fusion": 2598,
    "ingest": 2342,
    "kernels": 4460,
    "model": 4895,
    "native": 1575,
    "options": 612,
    "query": 3240,
    "records": 385,
    "remote": 5009,
    "reports": 2628,
    "retrieval": 1971,
    "serve": 5104,
    "session": 1624,
    "streaming": 554,
    "top": 246,
    "upkeep": 1073,
    "vllm": 999,
}
PRODUCT_LINES = 64_382
TEST_LINES = 60_058


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module given by its parts, such as ("kvtool", "core", "cache", "store")."""
    if parts[1:2] == ("core",):
        return parts[2] if len(parts) > 2 else "top"
    return parts[1] if len(parts) > 1 and parts[1] in ("cli", "reports", "serve", "vllm") else "top"


@dataclass(frozen=True)
class Import:
    """An import of kvtool's own, anywhere in a file."""

    module: str
    imported: str

    @property
    def rooms(self) -> tuple[str, str]:
        here, there = room_of(tuple(self.module.split("."))), room_of(tuple(self.imported.split(".")))
        return ("top", "top") if "top" in (here, there) else (here, there)


@functools.cache
def imports() -> tuple[Import, ...]:
    modules = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = []
    for module, path in modules.items():
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            for name in _names(node):
                imported = name if name in modules else name.rpartition(".")[0]
                found.append(Import(module, imported))
    return tuple(found)


def _name(path: Path) -> str:
    return ".".join(("kvtool", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("kvtool.")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtool"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_every_room_has_its_place() -> None:
    assert {room for found in imports() for room in found.rooms} <= {*ORDER, "top"}


def test_imports_point_one_way() -> None:
    wrong: dict[tuple[str, str], set[str]] = {}
    for found in imports():
        here, there = found.rooms
        if here == there:
            continue
        apart = any({here, there} <= floor for floor in APART)
        if apart or ORDER.index(there) > ORDER.index(here):
            wrong.setdefault((here, there), set()).add(found.module)
    assert wrong == {}


def test_no_room_exceeds_its_limit() -> None:
    lines = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        lines[room_of(tuple(_name(path).split(".")))] += _count_lines(path)
    assert {room: count for room, count in lines.items() if count > LINES.get(room, 0)} == {}
    assert lines.total() <= PRODUCT_LINES


def test_the_tests_do_not_exceed_their_limit() -> None:
    assert sum(_count_lines(path) for path in Path(__file__).parent.rglob("*.py")) <= TEST_LINES


def _count_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_kernels_never_import_transformers() -> None:
    """Kernels are functions of tensors: an import of a model's library, anywhere in a file, fails."""
    imported = {
        (path.name, name.partition(".")[0])
        for path in (PACKAGE / "core" / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in _all_names(node)
    }
    assert {name for _, name in imported} >= {"torch", "kvtool"}
    assert {file for file, name in imported if name == "transformers"} == set()


def test_what_vllm_needs_is_imported_without_transformers() -> None:
    """vLLM brings another version of it than kvtool takes; only imports inside of functions may ask for it."""
    modules = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    left, seen, imported = ["kvtool.vllm.connector", "kvtool.core.session.gate"], set[str](), set[str]()
    while left:
        module = left.pop()
        if module in seen or module not in modules:
            continue
        seen.add(module)
        for name in _imported_at_once(ast.parse(modules[module].read_text("utf-8")).body):
            imported.add(name.partition(".")[0])
            left += [name, name.rpartition(".")[0]]
    assert {"kvtool.core.fusion.engine", "kvtool.core.model.decoder", "kvtool.core.query.prompt"} <= seen
    assert not imported & {"transformers", "gguf", "tokenizers"}


def _imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module imports when it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef) and "TYPE_CHECKING" not in ast.unparse(node):
            yield from _imported_at_once(node.body)


def test_the_product_imports_no_script_of_its_makers() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {
            name.partition(".")[0] for node in ast.walk(ast.parse(path.read_text("utf-8"))) for name in _all_names(node)
        }
        assert not names & {"samples", "tests"}, path


def _all_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_no_module_imports_itself_over_others() -> None:
    """Imports inside of functions and only for types count too: the former would only hide a circle, and what needs
    the other's types cannot be read without it."""
    graph: dict[str, set[str]] = {}
    for found in imports():
        if found.imported != found.module:
            graph.setdefault(found.module, set()).add(found.imported)
    TopologicalSorter(graph).prepare()  # raises CycleError
