"""Every exit code of the contract, by a command that really ends so."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, command, environment, kvtool, untouched
from tests.families import save_tiny


def test_0_done(store: Path, form: Any) -> None:
    kvtool("query", QUESTION, "--store", store, *SHORT, *form).fine()


def test_1_failed(store: Path, form: Any) -> None:
    with untouched(store):
        kvtool("query", "zzyzx", "--store", store, *form).failed(1, "no chunk matches")


@pytest.mark.parametrize(
    "args",
    [
        ("query", QUESTION, "--ratio", "1.5"),
        ("query", QUESTION, "--fusion", "glue"),
        ("query", QUESTION, "--compare", "full,glue"),
        ("query", QUESTION, "--compare", "epic,unoin"),
        ("query", QUESTION, "--compare", ","),
        ("query", QUESTION, "--link", "middle"),
        ("query", QUESTION, "--chunks", "00" * 20),
        ("query", QUESTION, "--chunks", "not hex"),
        ("query", QUESTION, "--documents", "nowhere.txt"),
        ("query", QUESTION, "--chunks", "00" * 20, "--documents", "mill0.md"),
        ("query", QUESTION, "--batch", "nowhere.jsonl"),
        ("query", "--batch", "nowhere.jsonl"),
        ("query", QUESTION, "--system", "nowhere.txt"),
        ("query", QUESTION, "--system", "@nowhere.txt"),
        ("query", QUESTION, "--system", " "),
        ("query",),
        ("query", ""),
        ("query", " \n "),
        ("query", QUESTION, "--device", "cuda:99"),
        ("ingest",),
        ("ingest", "/nowhere"),
        ("ingest", "/", "--max-size", "big"),
        ("ingest", "/", "--lead-in", "sink:0"),
        ("ingest", "/", "--max-tokens", "10", "--chunk-tokens", "20"),
        ("inspect", "everything"),
        ("store", "verify", "--sample", "3/2"),
    ],
    ids=" ".join,
)
def test_2_usage(args: tuple[str, ...], store: Path, form: Any) -> None:
    with untouched(store):
        kvtool(*args, "--store", store, *form).failed(2)


@pytest.mark.parametrize(
    "args", [("query", QUESTION), ("store", "ls"), ("store", "stats"), ("store", "verify"), ("inspect",)]
)
def test_10_no_store(args: tuple[str, ...], tmp_path: Path, form: Any) -> None:
    kvtool(*args, "--store", tmp_path / "nowhere", *form).failed(10, "no store at")
    assert not (tmp_path / "nowhere").exists()


def test_11_locked(store: Path, corpus: Path, tmp_path: Path, form: Any) -> None:
    (tmp_path / "new.txt").write_text("A new mill.")
    with Store.open(store) as held, held.writer():
        done = kvtool("ingest", tmp_path / "new.txt", "--store", store, "--lock-wait", "0", *form)
        done.failed(11)
        kvtool("query", QUESTION, "--store", store, *SHORT).fine()  # reads wait for no lock


def test_12_another_model(store: Path, corpus: Path, tiny: Path, tmp_path: Path, form: Any) -> None:
    other = save_tiny("llama", tmp_path / "other", seed=1)
    with untouched(store):
        kvtool("query", QUESTION, "--store", store, "--model", other, *form).failed(12, "another model")
        kvtool("ingest", corpus, "--store", store, "--model", other, *form).failed(12, "another model")
        kept = ("--model", tiny, "--store-dtype", "float32")
        kvtool("ingest", corpus, "--store", store, *kept, *form).failed(2, "the store keeps bfloat16")


def test_a_store_that_is_open_to_others_is_said(store: Path) -> None:
    assert kvtool("store", "verify", "--store", store).fine().err == ""
    store.chmod(0o755)
    assert f"{store} can be read by others" in kvtool("store", "verify", "--store", store).fine().err


def test_13_a_damaged_store_file(store: Path, form: Any) -> None:
    (store / "store.json").write_text("{")
    kvtool("query", QUESTION, "--store", store, *form).failed(13)


def test_14_over_the_budget(store: Path, tmp_path: Path, form: Any) -> None:
    (tmp_path / "new.txt").write_text("A new mill.")
    with untouched(store):
        done = kvtool("ingest", tmp_path / "new.txt", "--store", store, "--max-size", "100k", *form)
        done.failed(14, "budget of 0.1 MB")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_130_and_143(number: signal.Signals, code: int, tiny: Path, tmp_path: Path) -> None:
    from tests.cli.working import damages, listing, write_corpus

    corpus, store = write_corpus(tmp_path / "corpus", documents=150, paragraphs=3), tmp_path / "store"
    args = ("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS, *PREFIX, "--json")
    with subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as child:
        wait_for_documents(store, 10)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "Traceback" not in err
    assert [line.startswith("error: ") for line in err.splitlines()].count(True) == 1
    assert "run the same command again" in err
    assert out.count("\n") == 1
    assert f'"exit_code": {code}' in out
    kept = len(listing(store))
    assert kept >= 10
    assert damages(store) == []
    again = kvtool(*args).fine().json
    assert again["documents"]["unchanged"] == kept
    assert again["documents"]["added"] == 150 - kept
    assert damages(store) == []


def wait_for_documents(path: Path, wanted: int, seconds: float = 120) -> None:
    """Wait until a running ingest has committed so many documents."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (path / "data").exists():
            with Store.open(path) as store:
                if len(store.sources()) >= wanted:
                    return
        time.sleep(0.005)
    raise AssertionError("the ingest commits nothing")
