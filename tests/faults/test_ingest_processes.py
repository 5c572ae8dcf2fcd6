"""Runs of cron that overlap, and questions meanwhile: whole processes, started from one that has imported torch."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, damages, kvtool, listing, write_corpus

_HEAVY = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "kvtool.core.ingest.storer",
    "kvtool.core.session.session",
    "kvtool.core.fusion.engine",
]
Result = tuple[int, str, str]


def command(args: list[str], results: Any) -> None:
    """Body of a process: one command as a shell would run it."""
    import torch

    from kvtool.cli.app import main

    torch.set_num_threads(1)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    results.put((args, (code, out.getvalue(), err.getvalue())))


def at_once(*commands: list[str]) -> list[tuple[list[str], Result]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_HEAVY, "tests.cli.working"])
    results = context.Queue()
    children = [context.Process(target=command, args=(args, results)) for args in commands]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    return found


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A corpus that is half ingested."""
    folder = write_corpus(tmp_path / "in", 3, 2)
    where = ("--store", tmp_path / "store", "--model", tiny)
    kvtool("ingest", folder, *where, *CHUNKS, *PREFIX).fine()
    kvtool("query", QUESTION, "--store", tmp_path / "store", *SHORT).fine()
    return write_corpus(tmp_path / "in", 6, 2)


@pytest.mark.slow
def test_two_ingests_and_ten_questions_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store, log = str(tmp_path / "store"), tmp_path / "log.jsonl"
    prebuild = ["ingest", str(folder), "--store", store, "--quiet", "--sync", "--lock-wait", "10m", "--log", str(log)]
    ask = ["query", QUESTION, "--store", store, "--json", *SHORT]
    for args, (code, out, err) in at_once(prebuild, prebuild, *[ask] * 10):
        assert code == 0, (args, err)
        if args[0] == "query":
            assert json.loads(out)["chunks"]
        else:
            assert (out, err) == ("", "")
    assert len(listing(tmp_path / "store")) == 6
    assert damages(tmp_path / "store") == []
    summaries = [event for event in map(json.loads, log.read_text().splitlines()) if event["type"] == "summary"]
    assert sorted(event["documents"]["added"] for event in summaries) == [0, 3]
    assert len({event["pid"] for event in summaries} - {os.getpid()}) == 2
