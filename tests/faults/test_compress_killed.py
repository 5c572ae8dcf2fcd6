"""Compressions that are killed: nothing exact is lost, nothing half is left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtool.core.cache import batch
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.compress import level_writer
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
from tests.faults.harness.children import in_child
from tests.remote.dying import dying


@pytest.fixture(scope="module")
def fitted_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fitted(make_plain(tiny, tmp_path_factory.mktemp("plain")), tmp_path_factory.mktemp("fitted"))


def compress(words: list[str], kill_at: int) -> None:
    """Killed when so many commits are done and the next one begins; each level of each chunk is a commit."""
    dying(Writer, ("commit", kill_at + 1, False))
    batch.BATCH_SECONDS = -1.0
    level_writer._AT_ONCE = 2
    kvtool(*words).fine()


@pytest.mark.slow
def test_killed_at_any_commit(fitted_store: Path, tmp_path: Path) -> None:
    """With --drop-raw, the most there is to lose; the next run does the rest, and the end is the same."""
    chunks, prefix = chunks_in(fitted_store), prefix_of(fitted_store)
    exact = {chunk: decoded(fitted_store, chunk, "raw").keys for chunk in chunks}
    expected = {level: rows(fitted_store, level) for level in ("3", "4")}
    words = ["compress", "--level", "3", "4", "--drop-raw", "--yes", "--questions", "0", "--store"]
    for kill_at in (0, 1, 3, 4, 6):
        path = Path(shutil.copytree(fitted_store, tmp_path / f"{kill_at}"))
        for level in ("1", "2", "3", "4"):
            drop(path, level)
        ended = in_child(lambda path=path, kill_at=kill_at: compress([*words, str(path)], kill_at))
        assert ended.killed_by == "SIGKILL", ended.trouble
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
    with Store.open(path) as store:
        assert verify(store) == []
    reply = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine().json
    assert {chunk["status"] for chunk in reply["chunks"]} <= {"hit", "exact"}
