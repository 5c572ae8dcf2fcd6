"""The gate at the command: refuses with numbers, lets `--force` and `full` through, and shows itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, fail_gate, kvtool, untouched, write_corpus


@pytest.fixture
def failed(store: Path) -> Path:
    fail_gate(store)
    return store


@pytest.mark.slow
def test_every_mode_but_full_refuses(failed: Path) -> None:
    with untouched(failed):
        for mode in ("prefix", "reuse", "epic", "blend", "auto"):
            done = kvtool("query", QUESTION, "--store", failed, "--fusion", mode, *SHORT, "--json")
            done.failed(12, "law 4", "0.731", "0.08", "--force", "--fusion full")
        kvtool("query", QUESTION, "--store", failed, "--compare", "reuse", *SHORT).failed(12, "law 4")
        kvtool("query", QUESTION, "--store", failed, "--fusion", "full", *SHORT).fine()
        forced = kvtool("query", QUESTION, "--store", failed, "--fusion", "reuse", "--force", *SHORT, "--json").fine()
        assert forced.json["tokens"]["reused"] > 0


def test_a_batch_is_refused_as_a_whole(failed: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"question": "mill"}\n{"question": "baker"}\n')
    args = ("query", "--batch", tmp_path / "b.jsonl", "--store", failed, *SHORT)
    assert kvtool(*args).failed(12, "law 4").out == ""
    kvtool(*args, "--force").fine()
    kvtool(*args, "--fusion", "full").fine()


def test_inspect_gate(store: Path, failed: Path) -> None:
    done = kvtool("inspect", "gate", "--store", failed, "--json")
    assert done.code == 12
    row = done.json
    assert row["passed"] is False
    assert {check["law"] for check in row["checks"]} == {1, 3, 4, 7}
    assert [check["law"] for check in row["checks"] if not check["passed"]] == [4]
    human = kvtool("inspect", "gate", "--store", failed)
    assert human.code == 12
    assert "FAILED" in human.out
    assert "FAILED" in kvtool("inspect", "--store", failed).fine().out
    assert kvtool("inspect", "--store", failed, "--json").fine().json["gate"]["passed"] is False


@pytest.mark.slow
def test_a_lost_or_broken_verdict_is_found_anew(store: Path) -> None:
    (verdict,) = (store / "gate").glob("*.json")
    for content in (None, "{", "[]", '{"format": 99}'):
        if content is None:
            verdict.unlink()
        else:
            verdict.write_text(content)
        kvtool("inspect", "gate", "--store", store).failed(1, "not been checked")
        kvtool("query", QUESTION, "--store", store, *SHORT).fine()
        kvtool("inspect", "gate", "--store", store).fine()


def test_a_model_that_fails_says_so_at_ingest(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate itself finds it: keys that are stored a few positions off."""
    from kvtool.core.kernels.rope import CosSin

    real = CosSin.inverse
    monkeypatch.setattr(CosSin, "inverse", lambda own: real(CosSin(own.cos.roll(1, 1), own.sin.roll(1, 1))))
    folder, path = write_corpus(tmp_path / "in", 2), tmp_path / "s"
    done = kvtool("ingest", folder, "--store", path, "--model", tiny, *CHUNKS, *PREFIX, "--json").fine()
    assert "the gate failed" in done.err
    assert done.json["gate"]["passed"] is False
    kvtool("query", QUESTION, "--store", path, *SHORT).failed(12, "the gate refuses")
    kvtool("query", QUESTION, "--store", path, "--fusion", "full", *SHORT).fine()
