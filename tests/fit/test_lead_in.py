"""`kvtool fit lead-in`, and stores whose chunks stand behind what it learned."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.fit import job
from kvtool.core.fit.training import Training
from kvtool.core.model.learned import LearnedRows
from kvtool.core.session.lead_in import learned_rows
from tests.cli.working import CHUNKS, QUESTION, SHORT, chunks_of, damages, kvtool, listing, payloads, write_corpus
from tests.families import save_tiny
from tests.fit.conftest import ROUNDS

LEARNED = ("--lead-in", "learned")


def state_of(path: Path) -> dict[str, Any]:
    with Store.open(path) as store:
        return store.lead_in_state()


def test_it_is_better_where_it_was_not_trained(plain: Path) -> None:
    report = kvtool("fit", "lead-in", "--store", plain / "s", *ROUNDS, "--json").fine().json
    assert report["held_out"]["learned"] < report["held_out"]["warm"]
    assert report["digest"] == state_of(plain / "s")["digest"]
    assert report["resumed"] == 0
    with Store.open(plain / "s") as store:
        rows = learned_rows(store, report["digest"])
    assert rows.keys.shape[2] == report["tokens"] == len(rows.ids)
    assert not list((plain / "s").rglob("*.checkpoint"))
    assert damages(plain / "s") == []


def test_in_half_precision(tiny: Path, tmp_path: Path) -> None:
    """Weights that are packed for speed would let no gradient through."""
    folder, path = write_corpus(tmp_path / "in", 8), tmp_path / "s"
    kvtool("ingest", folder, "--store", path, "--model", tiny, "--dtype", "bfloat16", *CHUNKS, "--quiet").fine()
    half = ("--store", path, "--dtype", "bfloat16", "--json")
    held_out = kvtool("fit", "lead-in", "--rounds", "8", *half).fine().json["held_out"]
    assert held_out["learned"] < held_out["warm"]
    report = kvtool("ingest", folder, *LEARNED, *half).fine().json
    assert report["resolved"]["dtype"] == "bfloat16"


def test_nothing_is_kept_that_is_no_better(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "step", lambda self, number, batch: 0.0)
    kvtool("fit", "lead-in", "--store", plain / "s", *ROUNDS).failed(1, "no better")
    assert state_of(plain / "s") == {}


def test_a_killed_fit_goes_on(plain: Path, taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the bytes of an undisturbed one."""
    monkeypatch.setattr(job, "_SAVE_EVERY", 1)
    step = Training.step

    def deadly(self: Training, number: int, batch: Any) -> float:
        if number == 5:
            raise KeyboardInterrupt
        return step(self, number, batch)

    monkeypatch.setattr(Training, "step", deadly)
    assert kvtool("fit", "lead-in", "--store", plain / "s", *ROUNDS).code == 130
    assert state_of(plain / "s") == {}
    monkeypatch.setattr(Training, "step", step)
    report = kvtool("fit", "lead-in", "--store", plain / "s", *ROUNDS, "--json").fine().json
    assert report["resumed"] == 2
    assert report["digest"] == state_of(taught / "s")["digest"]


def test_a_damaged_or_foreign_checkpoint_is_not_used(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_SAVE_EVERY", 1)
    monkeypatch.setattr(job.Checkpoint, "drop", lambda self: None)
    kvtool("fit", "lead-in", "--store", plain / "s", *ROUNDS).fine()
    (file,) = (plain / "s").rglob("*.checkpoint")
    assert kvtool("fit", "lead-in", "--store", plain / "s", "--rounds", "2", "--json").fine().json["resumed"] == 0
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert kvtool("fit", "lead-in", "--store", plain / "s", "--rounds", "2", "--json").fine().json["resumed"] == 0


def test_chunks_stand_behind_what_was_learned(learned: Path, documents: Path) -> None:
    path, args = learned / "s", ("--store", learned / "s", "--json")
    before, ids = payloads(path), {chunk for row in listing(path) for chunk in chunk_ids(row)}
    dry = kvtool("ingest", documents, *args, *LEARNED, "--dry-run").fine().json
    report = kvtool("ingest", documents, *args, *LEARNED).fine().json
    assert dry["chunks"]["computed"] == report["chunks"]["computed"] == len(ids)
    assert report["resolved"]["lead_in"] == "learned"
    assert report["gate"] is None or report["gate"]["passed"]
    assert ids.isdisjoint(chunk for row in listing(path) for chunk in chunk_ids(row))
    assert payloads(path).keys() != before.keys()
    for again in ((), LEARNED):
        assert kvtool("ingest", documents, *args, *again).fine().json["documents"]["unchanged"] == 8
    done = kvtool("query", QUESTION, *args, *SHORT, "--compare", "full,reuse,epic,infoflow,union", "--token-ids")
    for run in done.fine().json["runs"]:
        assert {chunk["status"] for chunk in run["chunks"]} <= {"hit", "miss", "fresh"}
    back = kvtool("ingest", documents, *args, "--lead-in", "warm").fine().json
    assert back["chunks"]["computed"] == len(ids)
    assert payloads(path) == before


def chunk_ids(row: dict[str, Any]) -> list[str]:
    return [chunk["id"] for chunk in row["chunks"]]


def test_a_hole_is_filled_behind_it(learned: Path, documents: Path) -> None:
    path = learned / "s"
    kvtool("ingest", documents, "--store", path, *LEARNED, "--quiet").fine()
    before, chunk = payloads(path), chunks_of(path, "mill2.md")[1]
    with Store.open(path) as store, store.writer(0) as writer:
        writer.drop_level([bytes.fromhex(chunk)], "raw")
    assert payloads(path) != before
    asked = ("query", QUESTION, "--store", path, "--documents", "mill2.md", *SHORT, "--fusion", "reuse", "--json")
    assert [one["status"] for one in kvtool(*asked).fine().json["chunks"]].count("miss") == 1
    assert payloads(path) == before
    assert {one["status"] for one in kvtool(*asked).fine().json["chunks"]} == {"hit"}


def test_a_new_fit_makes_chunks_anew_only_when_asked(learned: Path, documents: Path) -> None:
    args = ("--store", learned / "s", "--json")
    kvtool("ingest", documents, *args, *LEARNED).fine()
    first = state_of(learned / "s")["digest"]
    assert kvtool("fit", "lead-in", *args, "--rounds", "6").fine().json["digest"] != first
    assert kvtool("ingest", documents, *args).fine().json["documents"]["unchanged"] == 8
    assert kvtool("ingest", documents, *args, *LEARNED).fine().json["documents"]["changed"] == 8


def test_another_store_of_the_model_takes_it(taught: Path, tiny: Path, tmp_path: Path) -> None:
    folder, path = write_corpus(tmp_path / "few", 2), tmp_path / "s"
    kvtool("ingest", folder, "--store", path, "--model", tiny, *CHUNKS, "--quiet").fine()
    kvtool("fit", "lead-in", "--store", path).failed(1, "different chunks")
    kvtool("fit", "lead-in", "--store", path, "--from", taught / "s", "--quiet").fine()
    assert state_of(path) == state_of(taught / "s")
    assert kvtool("ingest", folder, "--store", path, *LEARNED, "--json").fine().json["documents"]["changed"] == 2


def test_another_models_is_refused(taught: Path, learned: Path, documents: Path, tmp_path: Path) -> None:
    other = save_tiny("qwen2", tmp_path / "other")
    folder, path = write_corpus(tmp_path / "in", 2), tmp_path / "s"
    kvtool("ingest", folder, "--store", path, "--model", other, *CHUNKS, "--quiet").fine()
    kvtool("fit", "lead-in", "--store", path, "--from", taught / "s").failed(12, "another model")
    with Store.open(taught / "s") as one, Store.open(path) as two, two.writer(0) as writer:
        state = one.lead_in_state()
        digest = bytes.fromhex(state["digest"])
        writer.put_learned(digest, bytes(one.learned(digest) or b""), state)
    kvtool("ingest", folder, "--store", path, *LEARNED).failed(12, "another model")
    with Store.open(learned / "s") as store, store.writer(0) as writer:
        writer.put_learned(digest, learned_rows(store, digest.hex()).data, state | {"ids": [1]})
    kvtool("ingest", documents, "--store", learned / "s", *LEARNED).failed(2, "instruction")


def test_every_flipped_byte_is_found(learned: Path, documents: Path) -> None:
    digest = bytes.fromhex(state_of(learned / "s")["digest"])
    (data,) = (learned / "s").rglob("data.mdb")
    with Store.open(learned / "s") as store:
        whole = bytes(store.learned(digest) or b"")
    for at in (0, 9, 100, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        with contextlib.suppress(DamagedError):
            assert LearnedRows.from_bytes(bytes(flipped)).digest != digest.hex()
    raw = bytearray(data.read_bytes())
    raw[raw.index(whole[-64:]) + 3] ^= 1
    data.write_bytes(bytes(raw))
    assert len(damages(learned / "s")) == 1
    kvtool("ingest", documents, "--store", learned / "s", *LEARNED).failed(13)
    kvtool("store", "verify", "--repair", "--store", learned / "s")
    kvtool("ingest", documents, "--store", learned / "s", *LEARNED).failed(13, "lost")
    kvtool("fit", "lead-in", "--store", learned / "s", *ROUNDS, "--quiet").fine()
    kvtool("ingest", documents, "--store", learned / "s", *LEARNED, "--quiet").fine()


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_rows_that_are_cut_off(cut: int, taught: Path) -> None:
    digest = bytes.fromhex(state_of(taught / "s")["digest"])
    with Store.open(taught / "s") as store:
        whole = bytes(store.learned(digest) or b"")
    assert LearnedRows.from_bytes(whole).data == whole
    with pytest.raises(DamagedError):
        LearnedRows.from_bytes(whole[:cut])


def test_planning_imports_no_torch(learned: Path, documents: Path) -> None:
    code = (
        "import sys; from kvtool.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 50 * ('torch' in sys.modules))"
    )
    args = ["ingest", str(documents), "--store", str(learned / "s"), *LEARNED, "--json", "--dry-run"]
    found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["chunks"]["computed"] > 0
