"""Compressions that are killed: nothing exact is lost, nothing half is left."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from tests.cli.working import QUESTION, SHORT, kvtool
from tests.compress.making import (
    check_sound,
    chunks_in,
    decoded,
    drop,
    levels_in,
    make_fitted,
    make_plain,
    prefix_of,
    rows,
)

WARM = ["kvtool.core.compress.level_writer", "kvtool.cli.compress", "kvtool.core.compress.job"]


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children that have torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    return context


@pytest.fixture(scope="module")
def fitted_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fitted(make_plain(tiny, tmp_path_factory.mktemp("plain")), tmp_path_factory.mktemp("fitted"))


def run_main(args: list[str], home: str, error: str, kill_at: int) -> None:
    """Run kvtool in a child, killed when so many commits are done and the next one begins."""
    os.environ.update(KVTOOL_HOME=home, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    from kvtool.cli.app import main
    from kvtool.core.cache import writer
    from kvtool.core.compress import level_writer

    works, calls = writer.Writer._commit, [0]

    def commit(self: Any, *rows: Any, **how: Any) -> None:
        if calls[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        works(self, *rows, **how)

    writer.Writer._commit = commit  # type: ignore[method-assign]
    writer.BATCH_SECONDS = -1.0  # each level of each chunk is a commit
    level_writer._AT_ONCE = 2
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = open(error, "w")  # noqa: SIM115
    sys.exit(main(args))


@pytest.mark.slow
def test_killed_at_any_commit(processes: Any, fitted_store: Path, tmp_path: Path, home: Path) -> None:
    """With --drop-raw, the most there is to lose; the next run does the rest, and the end is the same."""
    chunks, prefix = chunks_in(fitted_store), prefix_of(fitted_store)
    exact = {chunk: decoded(fitted_store, chunk, "raw").keys for chunk in chunks}
    expected = {level: rows(fitted_store, level) for level in ("3", "4")}
    words = ["compress", "--level", "3", "4", "--drop-raw", "--yes", "--questions", "0", "--store"]
    killed = 0
    for kill_at in (0, 1, 3, 4, 6):
        path = Path(shutil.copytree(fitted_store, tmp_path / f"{kill_at}"))
        for level in ("1", "2", "3", "4"):
            drop(path, level)
        child = processes.Process(
            target=run_main, args=([*words, str(path)], str(home), str(tmp_path / "err"), kill_at)
        )
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), (tmp_path / "err").read_text()
        killed += child.exitcode == -signal.SIGKILL
        check_sound(path)
        found = levels_in(path)
        assert found[prefix] == ["raw"]
        for chunk in chunks:
            assert found[chunk] in (["raw"], ["4", "raw"], ["3", "4", "raw"], ["3", "4"])
        done = kvtool(*words, path, "--json").fine().json
        assert done["chunks"]["encoded"] == sum("3" not in found[chunk] for chunk in chunks)
        assert levels_in(path) == {chunk: ["3", "4"] for chunk in chunks} | {prefix: ["raw"]}
        for level in ("3", "4"):
            assert set(rows(path, level)) == set(expected[level])
        for chunk, keys in exact.items():
            for found_keys, own in zip(decoded(path, chunk, "3").keys, keys, strict=True):
                assert float((found_keys - own).norm() / own.norm()) < 0.3
        check_sound(path)
    assert killed == 5
    with Store.open(path) as store:
        assert verify(store) == []
    reply = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine().json
    assert {chunk["status"] for chunk in reply["chunks"]} <= {"hit", "exact"}
