"""The pages and the figure by machine, from invented results."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint.files import ModelFiles
from samples.benchmarks import machine_pages, machines
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
def pages(tmp_path: Path) -> Path:
    results(tmp_path / "machines", "mine")
    results(tmp_path / "machines", "plain", ATEN_CPU_CAPABILITY="avx2")
    run("benchmarks/machines.py", "--results", str(tmp_path), "pages")
    return tmp_path


def test_a_table_for_each_machine(pages: Path) -> None:
    text = (pages / "machines.md").read_text()
    assert text.count("\n## A CPU") == 2
    assert "held to AVX2" in text
    rows = [line for line in text.splitlines() if line.startswith(("| 1,000", "| 4,000"))]
    assert len(rows) == 4
    assert "| 0.20 (0.50) |" in rows[0]  # union: 400 / 200 at a quarter of the FLOPs
    assert rows[0].split(" | ")[5:7] == ["1.13", "0.08"]
    assert rows[0].endswith("| 100 · 200 |")  # llama.cpp decodes quicker without flash attention: 4 tokens in 20 ms


def test_whatever_is_lost_is_named_with_its_reason(pages: Path) -> None:
    text = (pages / "peers.md").read_text()
    _, losses = text.split("## What kvtool loses, and why")
    named = [line.split("**")[1] for line in losses.splitlines() if line.startswith("- **")]
    assert named == ["decoding", "first token, reuse against a saved state"]
    assert "worse in 4 of 4 cases, at worst 2x" in losses
    assert "| decoding, tokens/s | 100 · 200 (**0.50x**) | 100 · 200 (**0.50x**) |" in text
    assert "| first token, full prefill, ms | 400 · 1,128 (2.8x) | 1,600 · 4,512 (2.8x) |" in text


def test_every_quantity_has_a_reason_in_store(pages: Path) -> None:
    machine = machine_pages.Machine.read(pages / "machines" / "mine.json")
    assert {one.what for one in machine_pages.compared(machine, 1000)} - set(machine_pages.REASONS) == {
        "stored, level 2"
    }


def test_the_figure_has_a_panel_for_each_machine(pages: Path) -> None:
    titles = [each.text for each in Xml.parse(pages / "machines.svg").iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * 5 * len(CONTEXTS)
    assert "llama.cpp: 1.128" in titles


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
