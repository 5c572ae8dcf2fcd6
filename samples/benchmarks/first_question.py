"""How soon a folder can be asked, and what questions cost while its KV is computed by use.

    python samples/benchmarks/first_question.py [FOLDER] [--model MODEL] [--questions N]

FOLDER: of Python modules; by default the standard library of this Python. Its texts are stored (`ingest --lazy`) in a
new store. Ten questions about the functions of one module follow, the first of them a second time and by full prefill,
then questions about functions of other modules. Run it alone: it times.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import kvtool

ONE_SUBJECT = 10  # questions about one module
_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload")


def documented(path: Path) -> list[str]:
    """Names of a module's functions that have a docstring."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    found = (node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))
    return [node.name for node in found if ast.get_docstring(node)]


def asked(modules: dict[str, list[str]], chance: random.Random) -> Iterator[str]:
    """Questions about one function of each module in turn, without an end."""
    for _ in itertools.count():
        for module in chance.sample(sorted(modules), len(modules)):
            yield f"What does {chance.choice(modules[module])} of the module {module} do?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(given.folder, Path(place, "documents"), ignore=_LEFT_OUT)
        files = sorted(path for path in folder.rglob("*.py"))
        modules = {path.stem: names for path in files if (names := documented(path))}
        subject = next(path for path in files if len(modules.get(path.stem, ())) >= ONE_SUBJECT)
        cache = kvtool.open(Path(place, "store"), given.model, warn=lambda text, hint: print("warning:", text))
        before = os.times()
        report = cache.ingest(folder, lazy=True)
        spent = sum(os.times()[:4]) - sum(before[:4])  # of child processes, too
        left = report.left
        assert left is not None
        size = sum(path.stat().st_size for path in files)
        print(
            f"{report.documents.added} documents, {size / 1e6:.1f} MB, {left.tokens:,} tokens in {left.chunks:,} chunks"
        )
        print(f"can be asked after {report.phase['texts']:.1f} s ({spent:.1f} s of a processor)")
        planned = cache.ingest(folder, dry_run=True).forecast
        assert planned is not None

        def ask(question: str, fusion: str = "union") -> tuple[float, float, int, int]:
            """Milliseconds to the first token, and those after the answer; passages with KV, and passages."""
            started = time.perf_counter()
            reply = cache.query(question, fusion=fusion, max_tokens=2)
            took = (time.perf_counter() - started) * 1e3
            first = reply.timing_ms["ttft"]
            had = sum(chunk.status != "miss" for chunk in reply.chunks)
            return first, took - first - reply.timing_ms["generate"], had, len(reply.chunks)

        names = modules[subject.stem][:ONE_SUBJECT]
        first, *others = (f"What does {name} of the module {subject.stem} do?" for name in names)
        ask(next(asked(modules, random.Random(1))))  # loads the model, and runs the gate
        cold, again, full = ask(first), ask(first), ask(first, "full")
        print(
            f"first answer {cold[0]:,.0f} ms ({cold[2]} of {cold[3]} passages with KV), {cold[1]:,.0f} ms to store them"
        )
        print(f"the same again {again[0]:,.0f} ms; by full prefill {full[0]:,.0f} ms")
        print("the same subject:", ", ".join(f"{ms:,.0f} ms ({had}/{of})" for ms, _, had, of in map(ask, others)))
        rest = itertools.islice(asked(modules, random.Random(0)), given.questions - ONE_SUBJECT)
        shares = [ask(question) for question in rest]
        hits = sum(had for *_, had, _ in shares) / sum(of for *_, of in shares)
        stored = cache.stats()["folder_bytes"]
        print(f"{given.questions} questions: median {median(ms for ms, *_ in shares):,.0f} ms, {hits:.0%} had KV")
        print(f"disk {stored / 1e6:,.0f} MB; all KV would take {planned.kv_bytes / 1e6:,.0f} MB")
        cache.close()


if __name__ == "__main__":
    main()
