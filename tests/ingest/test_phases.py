"""Where the time of an ingest goes that is not its chunks'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtool.cli.ingest import is_mostly_beside, time_of
from kvtool.core.ingest.ingest_report import IngestReport
from tests.cli.working import write_corpus


def test_a_first_run_tells_its_phases_and_an_idle_one_loads_nothing(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1, 1)
    first = fresh(folder).fine().json
    assert set(first["phases"]) == {"model_files", "model_load", "lead_in", "index", "gate"}
    assert all(seconds > 0 for seconds in first["phases"].values())
    assert sum(first["phases"].values()) + first["prefill_seconds"] <= first["seconds"]
    assert set(fresh(folder).fine().json["phases"]) == {"model_files"}


def test_a_run_explains_itself_where_most_of_it_was_no_chunk() -> None:
    report = IngestReport(tokens=159, seconds=28.0, prefill_seconds=1.0)
    report.phases = {"model_load": 8.0, "lead_in": 3.0, "gate": 9.25}
    assert is_mostly_beside(report)
    assert time_of(report) == (
        "of these 1.0 s computing chunks, 8.0 s loading the model, 3.0 s computing what stands before every chunk, "
        "9.2 s the gate, once for a model and a store"
    )
    report.seconds = 60.0
    assert not is_mostly_beside(report)
    assert not is_mostly_beside(IngestReport(tokens=1, seconds=0.3, phases={"gate": 0.2}))
