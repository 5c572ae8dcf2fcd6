"""The tables by machine, from invented results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint.files import ModelFiles
from samples.benchmarks import machines
from samples.benchmarks.systems.job import Found, Run
from samples.benchmarks.systems.rows import gathered
from tests.samples.benchmarks.fabricated import HOST, STORED, TRIED, contenders, measured, options
from tests.samples.tools.test_scripts import run

CONTEXTS = (1000, 4000)


def results(folder: Path, name: str, **held: str) -> None:
    """A file as `machines.py measure` writes it."""
    made = [Run(each, context, 0, measured(each, context)) for context in CONTEXTS for each in contenders()]
    stored = (*STORED, {"level": "lossless", "bytes_per_token": 15000.0})
    host = HOST | {"held_to": held}
    found = Found(ModelFiles("smollm2", Path(), "packaged"), "float32", tuple(made), host, stored, {"rows": TRIED})
    bench: dict[str, Any] = gathered(found, options(contexts=CONTEXTS, repeat=1), 2).to_json()
    folder.mkdir(parents=True, exist_ok=True)
    told = {"name": name, "date": "2026-11-23", "commit": "abc", "bench": bench}
    (folder / f"{name}.json").write_text(json.dumps(told))


@pytest.fixture
def tables(tmp_path: Path) -> str:
    results(tmp_path / "machines", "mine")
    results(tmp_path / "machines", "plain", ATEN_CPU_CAPABILITY="avx2")
    return run("benchmarks/machines.py", "--results", str(tmp_path), "tables")


def test_a_table_for_each_machine(tables: str) -> None:
    assert tables.count("### A CPU") == 2
    assert "limited to AVX2" in tables
    assert "| decoding, tokens/s | 100 · 200 (**0.50x**) | 100 · 200 (**0.50x**) |" in tables
    assert "| first token: full prefill, ms | 400 · 1,128 (2.8x) | 1,600 · 4,512 (2.8x) |" in tables


def test_the_tables_are_those_of_the_page() -> None:
    page = (machines.RESULTS / "speed.md").read_text(encoding="utf-8")
    assert run("benchmarks/machines.py", "tables").strip() in page


def test_rounds_go_on_while_there_is_time_and_short_prompts_get_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    clock = [0.0]

    def bench(args: list[str], held: str | None) -> dict[str, Any]:
        context, rounds = (args[args.index(flag) + 1] for flag in ("--context", "--repeat"))
        Path(args[args.index("--resume") + 1]).touch()
        asked.append((context, rounds))
        clock[0] += {"1000": 60.0, "8000": 400.0}.get(context, 0.0)
        return {"rows": []}

    monkeypatch.setattr(machines, "bench", bench)
    monkeypatch.setattr(machines.time, "monotonic", lambda: clock[0])
    given = argparse.Namespace(name="mine", context="1000,8000", minutes=12.0, held=None)
    target = machines.measure(tmp_path, given, [])
    first, more = [("1000", "1"), ("8000", "1")], [("1000", "2"), ("1000", "3"), ("1000", "4"), ("1000", "5")]
    assert asked == [*first, *more, ("1000,8000", "1")]
    assert json.loads(target.read_text())["bench"] == {"rows": []}
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]
