"""The example plugins, built and installed as a user would, and what stays of them when they are gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import CHUNKS, PREFIX, environment, kvtool, write_corpus

ROOT = Path(__file__).parents[2]
_CALENDAR = """BEGIN:VCALENDAR
BEGIN:VEVENT
SUMMARY:Holiday
END:VEVENT
BEGIN:VEVENT
SUMMARY:Meeting with baker Q\\, the
  miller
LOCATION:서울
END:VEVENT
END:VCALENDAR
"""
# One process for all of it: torch takes seconds to import.
_SCRIPT = """
import contextlib, io, json, sys
from kvtool.cli.app import main
done = {}
for name, args in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    done[name] = [code, json.loads(out.getvalue().splitlines()[-1]), err.getvalue()]
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("plugins")
    source = shutil.copytree(ROOT / "samples" / "plugins", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--no-warn-conflicts", "--target", str(folder / "target"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "target"


@pytest.fixture(scope="module")
def made(target: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What commands say with the plugins installed, and the `folder` they worked in."""
    folder = tmp_path_factory.mktemp("made")
    corpus = write_corpus(folder / "corpus", 3, 3)
    (corpus / "work.vcs").write_text(_CALENDAR)
    here, there = ["--store", str(folder / "store")], f"sqlite://{folder}/kv.db"
    model, kept = ["--model", str(tiny), *CHUNKS, *PREFIX], ["--store-dtype", "float32"]
    ask = ["query", "Whom do I meet, baker Q the miller?", *"--max-tokens 2 --json --top-k 3".split()]
    ask += ["--set", "search.min_score=0"]
    commands = {
        "plugins": ["doctor", *here, "--json"],
        "ingest": ["ingest", str(corpus), *here, *model, *kept, "--embedder", "letters", "--json"],
        "query": [*ask, *here, "--fusion", "spread", "--ratio", "30%", "--retriever", "hybrid"],
        "everything": [*ask, *here, "--compare", "spread", "--ratio", "100%"],
        "push": ["store", "push", there, *here, "--json"],
        "query shared": [*ask, "--store", there, "--fusion", "spread"],
        "verify": ["store", "verify", *here, "--json"],
    }
    paths = os.pathsep.join([str(target), str(ROOT)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            input=json.dumps(commands).encode(),
            capture_output=True,
            env=environment(PYTHONPATH=paths),
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert {name: code for name, (code, *_) in said.items()} == dict.fromkeys(said, 0), said
    return {name: value for name, (_, value, _) in said.items()} | {"folder": folder}


@pytest.mark.slow
def test_a_calendar_is_read_found_fused_and_shared(made: dict[str, Any]) -> None:
    subjects = {row["subject"] for row in made["plugins"]["findings"] if row["state"] == "ok"}
    assert {f"plugin {each}" for each in ("vcs (readers)", "letters (embedders)", "spread (selectors)")} <= subjects
    assert "plugin sqlite (blobs)" in subjects
    assert made["ingest"]["documents"]["added"] == 4
    reply = made["query"]
    best = max(reply["chunks"], key=lambda chunk: chunk["score"])
    assert best["source"].endswith("work.vcs")
    assert reply["fusion"] == "spread"
    assert 0 < reply["tokens"]["recomputed"] < reply["tokens"]["reused"]
    assert made["verify"]["damaged"] == []
    (run,) = [run for run in made["everything"]["runs"] if run["fusion"] == "spread"]
    assert run["kl_answer"] < 1e-6  # the law of recomputing everything
    assert made["query shared"]["tokens"]["reused"] > 0


@pytest.mark.slow
def test_without_the_package_its_mode_and_store_are_unknown(made: dict[str, Any], tmp_path: Path) -> None:
    folder = made["folder"]
    store = Path(shutil.copytree(folder / "store", tmp_path / "store"))
    ask = ("query", "Which mill was built by baker B?", "--store", store, "--max-tokens", "2", "--retriever", "bm25")
    assert kvtool(*ask, "--json").fine().json["tokens"]["reused"] > 0
    kvtool(*ask, "--fusion", "spread").failed(2, "'spread'")
    kvtool("store", "push", f"sqlite://{folder}/kv.db", "--store", store).failed(2, "sqlite")
