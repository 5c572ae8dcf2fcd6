"""`kvtool doctor`: a line for all that a question needs, and a hint for every line that is not as it should be."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest
from transformers import GPT2Config

from tests.cli.working import Done, fail_gate, kvtool

ALWAYS = {"kvtool", "CPU", "device", "disk of the cache", "model"}
OF_A_STORE = ALWAYS | {"libraries", "disk of the store", "store", "dtype", "gate"}


def states(done: Done) -> dict[str, str]:
    findings = done.json["findings"]
    assert all(row["message"] and (row["hint"] or row["state"] == "ok") for row in findings), findings
    assert done.json["healthy"] == all(row["state"] != "failed" for row in findings) == (done.code == 0)
    return {row["subject"]: row["state"] for row in findings}


@pytest.mark.slow
def test_a_good_store_is_well(store: Path) -> None:
    done = kvtool("doctor", "--store", store, "--json")
    found = states(done)
    assert set(found) >= OF_A_STORE
    assert done.code == 0, done.out


@pytest.mark.slow
def test_the_attention_backend_is_explained(store: Path) -> None:
    reason = "not triton: it runs on CUDA"
    assert reason in kvtool("doctor", "--store", store, "-v").fine().out
    said = kvtool("doctor", "--store", store).fine().out
    assert "ok       attention " in said
    assert "ok       gate " in said
    assert reason not in said
    rows = kvtool("doctor", "--store", store, "--json").fine().json["findings"]
    assert reason in next(row for row in rows if row["subject"] == "attention")["details"]


def test_chunks_are_counted_as_the_glance_counts_them(store: Path) -> None:
    said = kvtool("inspect", "--store", store).fine().out
    count = said.split("content  ")[1].split(" document")[1].split(", ")[1].split(";")[0]
    assert f"{count} and the prompt's own beginning" in kvtool("doctor", "--store", store).out


@pytest.mark.slow
def test_a_shared_store_is_known_by_the_store_in_front(store: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'shared'}"
    kvtool("store", "push", url, "--store", store).fine()
    assert "model" not in states(kvtool("doctor", "--store", url, "--json"))  # no other one is looked for
    kvtool("inspect", "--store", url).fine()
    assert set(states(kvtool("doctor", "--store", url, "--json"))) >= OF_A_STORE | {"shared store"}


def test_a_gate_that_refuses_is_told(store: Path) -> None:
    fail_gate(store)
    done = kvtool("doctor", "--store", store)
    assert done.code == 1
    assert "FAILED   gate " in done.out
    assert "--fusion full" in done.out
    assert "1 failed" in done.err


@pytest.mark.slow
def test_what_does_not_exist_yet_is_no_fault(tmp_path: Path, tiny: Path) -> None:
    found = states(kvtool("doctor", "--store", tmp_path / "none" / "yet", "--model", tiny, "--json"))
    assert found["store"] == "ok"
    assert "gate" not in found
    assert not (tmp_path / "none").exists()
    assert states(kvtool("doctor", "--store", tmp_path / "none", "--json"))["model"] == "warning"


def test_a_model_that_is_missing_or_refused_is_told(tmp_path: Path, tiny: Path) -> None:
    done = kvtool("doctor", "--store", tmp_path / "none", "--model", tmp_path / "no-model", "--json")
    assert states(done)["model"] == "failed"
    model = Path(shutil.copytree(tiny, tmp_path / "gpt2"))
    GPT2Config(n_layer=2, n_embd=64, n_head=2).save_pretrained(model)
    done = kvtool("doctor", "--store", tmp_path / "none", "--model", model, "--json")
    assert states(done)["model"] == "failed"
    (found,) = [row for row in done.json["findings"] if row["subject"] == "model"]
    assert "RoPE" in found["message"]


@pytest.mark.parametrize(("place", "subject"), [("file.txt", "store"), ("redis://127.0.0.1:1/0", "shared store")])
def test_a_store_that_cannot_be_used_is_told(tmp_path: Path, tiny: Path, place: str, subject: str) -> None:
    (tmp_path / "file.txt").write_text("no store")
    where = place if "://" in place else tmp_path / place
    done = kvtool("doctor", "--store", where, "--model", tiny, "--remote-timeout", "2s", "--json")
    assert states(done)[subject] == "failed"


def test_libraries_that_are_missing_or_untested_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = metadata.version

    def other(name: str) -> str:
        if name == "redis":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "zstandard" else true(name)

    monkeypatch.setattr(metadata, "version", other)
    found = states(kvtool("doctor", "--store", tmp_path / "none", "--json"))
    assert (found["zstandard"], found["extra [redis]"]) == ("warning", "ok")
    monkeypatch.setattr(metadata, "version", lambda name: true("no-such-library"))
    done = kvtool("doctor", "--store", tmp_path / "none", "--json")
    assert states(done)["torch"] == "failed"
    assert "CPU" not in states(done)  # what needs the libraries is not looked at
