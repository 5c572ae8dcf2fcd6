"""Where the time of an ingest goes that is not its chunks'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.cli.ingest import is_mostly_beside, time_of
from kvtool.core.checkpoint.files import DOWNLOAD
from kvtool.core.common.types import Events
from kvtool.core.ingest import account
from kvtool.core.ingest.ingest_report import PHASES, IngestReport
from kvtool.core.ingest.options import IngestOptions
from tests.checkpoint.gguf_files import write_gguf
from tests.cli.working import kvtool, write_corpus


@pytest.mark.slow
def test_a_first_run_tells_its_phases_and_an_idle_one_loads_nothing(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    first = fresh(folder).fine().json
    assert set(first["phases"]) == {"model_files", "model_load", "lead_in", "index", "gate"}
    assert all(seconds > 0 for seconds in first["phases"].values())
    assert sum(first["phases"].values()) + first["prefill_seconds"] <= first["seconds"]
    assert set(fresh(folder).fine().json["phases"]) == {"model_files"}


@pytest.mark.slow
def test_the_first_use_of_a_gguf_file_is_a_phase_of_its_own(tmp_path: Path) -> None:
    """Half a minute of the packaged model, which was taken for the reading of settings."""
    model, folder = write_gguf(tmp_path / "tiny.gguf"), write_corpus(tmp_path / "in", 1, 1)
    first, second = (
        kvtool("ingest", folder, "--store", tmp_path / store, "--model", model, "--json", "-v").fine()
        for store in ("first", "second")
    )
    phases = first.json["phases"]
    assert phases["model_unpack"] > 0
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) <= first.json["seconds"]  # none counts twice
    assert "unpacking the model from its GGUF file, once" in first.err
    assert second.json["phases"].keys() == phases.keys() - {"model_unpack"}
    assert "unpacking" not in second.err


def test_a_phase_within_a_phase_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[str]()
    monkeypatch.setattr(account.time, "perf_counter", lambda: now[0])
    kept = account.Account(IngestOptions(), Events(status=told.append))
    with kept.phase("model_files"):
        now[0] += 1
        with kept.phase(DOWNLOAD):
            now[0] += 20
        now[0] += 2
    with kept.phase("model_files"):
        now[0] += 4
    assert kept.report.phases == {"model_download": 20, "model_files": 7}
    assert told == [PHASES[name] for name in ("model_files", "model_download", "model_files")]


def test_a_run_explains_itself_where_most_of_it_was_no_chunk() -> None:
    report = IngestReport(tokens=159, seconds=28.0, prefill_seconds=1.0)
    report.phases = {"model_load": 8.0, "lead_in": 3.0, "gate": 9.25}
    assert is_mostly_beside(report)
    assert time_of(report) == (
        "of these 1.0 s computing chunks, 8.0 s loading the model, 3.0 s computing the lead-in, "
        "9.2 s trying the model on this store (the gate), once"
    )
    report.seconds = 60.0
    assert not is_mostly_beside(report)
    assert not is_mostly_beside(IngestReport(tokens=1, seconds=0.3, phases={"gate": 0.2}))
