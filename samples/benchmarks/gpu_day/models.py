"""Models end to end by the command line: a tiny one, one of Qwen3-0.6B's size, a real one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samples.benchmarks.gpu_day.carried import ROOT
from samples.benchmarks.gpu_day.day import Day

QUESTION = "Who founded the observatory?"
MODES = ("full", "reuse", "epic", "union", "infoflow", "blend")


def run(day: Day) -> None:
    models: dict[str, Callable[[], Path]] = {"tiny, random": partial(tiny, day)}
    if not day.dry:
        models["qwen3-0.6b, random"] = partial(sized, day)
    if day.model is not None:
        given = day.model
        models[given.name] = lambda: given
    else:
        day.step("a real model", lambda: {"missing": "give one by --model FILE.gguf or FOLDER"})
    for name, made in models.items():
        day.step(name, partial(_end_to_end, day, made), least_s=5 if day.dry else 60)


def tiny(day: Day) -> Path:
    """A tiny Qwen3 with random weights."""
    from tests.families import save_tiny

    return save_tiny("qwen3", day.scratch / "tiny-model", dtype="bfloat16")


def sized(day: Day) -> Path:
    """Qwen3-0.6B's architecture with random weights and the tests' tokenizer: what it says means nothing."""
    from samples.benchmarks.bench.shapes import build_shape
    from tests.families import tiny_tokenizer

    folder = day.scratch / "sized-model"
    if not (folder / "config.json").exists():
        build_shape("qwen3-0.6b", "cpu", "bfloat16").model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def _end_to_end(day: Day, made: Any) -> dict[str, Any]:
    model, store = made(), day.scratch / "store"
    shutil.rmtree(store, ignore_errors=True)
    found: dict[str, Any] = {}
    corpus = day.scratch / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    files = sorted(path for path in (ROOT / "samples" / "corpus").rglob("*.md"))[: 2 if day.dry else 12]
    corpus.mkdir()
    for path in files:
        shutil.copy(path, corpus)
    given = ["--store", str(store)]
    found["ingest"] = command(day, "ingest", str(corpus), "--model", str(model), *given, "--json")
    for mode in MODES:
        asked = ["query", QUESTION, "--fusion", mode, "--max-tokens", "16", "--force", *given, "--json"]
        found[mode] = _answer(command(day, *asked))
    found["compress"] = command(day, "compress", *given, "--json")
    found["union, compressed"] = _answer(
        command(day, "query", QUESTION, "--max-tokens", "16", "--force", *given, "--json")
    )
    found["verify"] = command(day, "store", "verify", *given, "--json")
    found["two arithmetics"] = _two_arithmetics(day, corpus, model, store)
    return found


def _two_arithmetics(day: Day, corpus: Path, model: Path, store: Path) -> dict[str, Any]:
    """The device's store asked on the CPU in float32, and one that the CPU made in float32 asked on the device: how
    many chunks are found, and what that loses by the gate's measure."""
    other = store.with_name("store-of-cpu")
    shutil.rmtree(other, ignore_errors=True)
    cpu, found = ("--device", "cpu", "--dtype", "float32"), {}
    command(day, "ingest", str(corpus), "--model", str(model), "--store", str(other), "--json", at=cpu)
    for name, made, at in (("asked on the CPU", store, cpu), ("asked on the device", other, ("--device", day.device))):
        place = ("--store", str(made))
        asked = ("query", QUESTION, "--fusion", "reuse", "--max-tokens", "16", *place, "--json")
        reply, gate = command(day, *asked, at=at), command(day, "inspect", "gate", *place, "--json", at=())
        statuses = [chunk["status"] for chunk in reply["chunks"]]
        found[name] = _answer(reply) | {
            "found": f"{len(statuses) - statuses.count('miss')} of {len(statuses)}",
            "nats_lost": gate.get("loss_by_arithmetic", {}),
        }
    return found


def _answer(reply: Any) -> Any:
    """The times and the text."""
    keep = ("answer", "timings", "timing", "fusion", "ttft_ms", "tokens")
    return {name: reply[name] for name in keep if name in reply} if isinstance(reply, dict) else reply


def command(day: Day, *words: str, at: Sequence[str] | None = None) -> Any:
    """Run a command and return its JSON; if it fails, raise with its output. `at`: its device, if not the day's."""
    device = at if at is not None else [] if words[0] == "store" else ["--device", day.device]
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", *words, *device],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"kvtool {' '.join(words[:2])}: exit {done.returncode}: {done.stderr[-1500:]}")
    return _last(done.stdout.splitlines())


def _last(lines: Sequence[str]) -> Any:
    text = "\n".join(lines)
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(lines[-1]) if lines else {}
