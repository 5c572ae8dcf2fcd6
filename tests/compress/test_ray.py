"""Ray's workers encode what one process encodes, a killed one included; what ends early is gone on with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtool.core.compress import encoders, level_writer
from tests.cli.working import kvtool
from tests.compress.making import check_sound, chunks_in, drop, levels_in, rows
from tests.crew.making import WORKERS, backwards, killing

COMMAND = ("compress", "--level", "1", "3", "lossless", "--questions", "0", "--json", "--store")


@pytest.fixture
def bare(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a profile and all nested levels but the finest; a chunk is a worker's batch."""
    drop(fitted, "1")
    monkeypatch.setattr(encoders, "BATCH_BYTES", 1)
    monkeypatch.setattr(level_writer, "_AT_ONCE", 4)
    return fitted


def _all(path: Path) -> dict[str, dict[tuple[str, int], bytes]]:
    return {level: rows(path, level) for levels in levels_in(path).values() for level in levels}


@pytest.mark.slow
def test_workers_encode_what_one_process_encodes(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 refines the stored level 2; a worker is killed; and there is nothing left to be done by a second run."""
    alone = Path(shutil.copytree(bare, tmp_path / "alone"))
    own = kvtool(*COMMAND, alone).fine().json
    killed = killing(monkeypatch)
    far = kvtool(*COMMAND, bare, *WORKERS).fine().json
    assert len(killed) == 1
    assert ["is replaced" in text for text in far["warnings"]] == [True]
    assert (far["workers"], own["workers"]) == (2, 0)
    assert _all(bare) == _all(alone)
    for name in ("levels", "chunks", "profile", "bytes_after"):
        assert far[name] == own[name]
    again = kvtool(*COMMAND, bare, *WORKERS).fine().json
    assert (again["chunks"]["encoded"], again["workers"]) == (0, 0)  # none were started


def test_what_is_stopped_is_gone_on_with(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --drop-raw, the most there is to lose; levels that leave rows out, whose choice is this process's."""
    alone, command = Path(shutil.copytree(bare, tmp_path / "alone")), (*COMMAND, bare, *WORKERS, "--drop-raw", "--yes")
    kvtool(*COMMAND, alone, "--keep", ".5", "--drop-raw", "--yes").fine()
    stopped = backwards(monkeypatch, "kvtool.core.compress.encoders", most=6)
    kvtool(*command, "--keep", ".5").failed(130)
    check_sound(bare)
    there = sum("raw" not in levels for levels in levels_in(bare).values())
    assert there == 4  # six were encoded, four of them read back
    later = backwards(monkeypatch, "kvtool.core.compress.encoders", most=99)
    done = kvtool(*command, "--keep", ".5").fine().json
    assert done["chunks"]["encoded"] <= len(chunks_in(bare)) - there
    assert [crew.is_closed for crew in stopped + later] == [True, True]
    assert _all(bare) == _all(alone)
    check_sound(bare)
