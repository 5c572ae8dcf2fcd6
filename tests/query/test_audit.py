"""`--audit`: an answer that has been given is held against full prefill, and what is found is kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import kvtool as api
from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
from kvtool.core.evaluate.measures import Audit, is_drawn, kept_audits
from kvtool.core.query import audit as module
from kvtool.core.session.identity import store_identity
from tests.cli.working import QUESTION, SHORT, chunks_of, drop_records, kvtool, write_batch
from tests.evaluate.test_audits import made

AT = (QUESTION, *SHORT, "--level", "raw")
ALL = ("--audit", "1")


def audits_of(path: Path) -> list[Audit]:
    with Store.open(path) as store:
        return list(kept_audits(store, store_identity(store).fingerprint))


@pytest.mark.slow
def test_it_says_what_compare_says(store: Path) -> None:
    for mode in ("union", "reuse", "epic"):
        kvtool("query", *AT, "--store", store, "--fusion", mode, *ALL).fine()
    compared = kvtool("query", *AT, "--store", store, "--compare", "union,reuse,epic", "--json").fine().json["runs"]
    found = audits_of(store)
    assert [audit.run for audit in found] == ["union:0.15", "reuse", "epic:16"]
    for audit, wanted in zip(found, compared[1:], strict=True):
        assert audit.kl_first == pytest.approx(wanted["kl_first"], abs=1e-9)
        assert audit.kl_answer == pytest.approx(wanted["kl_answer"], abs=1e-9)
        assert (audit.top1_agrees, audit.answer_equal) == (wanted["top1_agrees"], wanted["answer_equal"])
        assert audit.levels == ["raw"]
        assert (audit.question, audit.revision) == (QUESTION, wanted["revision"])
        counts = {name: audit.tokens[name] for name in ("prompt", "reused", "recomputed", "fresh")}
        assert counts.items() <= wanted["tokens"].items()


@pytest.mark.parametrize("error", [KvtoolError("out of memory computing", "use fewer chunks"), MemoryError()])
def test_the_answer_stands_before_it_is_audited(store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Audit:
        raise error

    monkeypatch.setattr(module, "audit", fail)
    plain = kvtool("query", *AT, "--store", store).fine()
    done = kvtool("query", *AT, "--store", store, *ALL).fine()
    assert done.out == plain.out
    assert "warning: an answer could not be audited: out of memory computing" in done.err
    assert done.err.index("sources: ") < done.err.index("could not be audited")
    assert audits_of(store) == []


@pytest.mark.slow
def test_a_setting_a_share_and_none_by_default(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [f"Who built the {number}. mill?" for number in range(12)]
    batch = write_batch(tmp_path / "batch.jsonl", *({"question": question} for question in questions))
    at = ("query", "--batch", batch, "--store", store, *SHORT, "--level", "raw", "--fusion", "reuse")
    assert "audited" not in kvtool(*at).fine().lines[-1]
    assert not (store / "audit").exists()
    monkeypatch.setenv("KVTOOL_AUDIT", "30%")
    *rows, summary = kvtool(*at).fine().lines
    drawn = [row["question"] for row in rows if is_drawn(row["question"], row["revision"], 0.3)]
    assert 0 < len(drawn) < 12
    assert [audit.question for audit in audits_of(store)] == drawn
    assert summary["audited"] == len(drawn)
    kvtool("query", *AT, "--store", store, "--audit", "2").failed(2, "not between 0 and 1")


@pytest.mark.slow
def test_modes_that_lose_nothing_are_not_audited(store: Path, tmp_path: Path) -> None:
    for mode in ("full", "prefix"):
        done = kvtool("query", *AT, "--store", store, "--fusion", mode, *ALL).fine()
        assert f"no audit: {mode} gives full prefill's answer by construction" in done.err
    batch = write_batch(tmp_path / "batch.jsonl", *[{"question": QUESTION}] * 2)
    done = kvtool("query", "--batch", batch, "--store", store, *SHORT, "--fusion", "full", *ALL).fine()
    assert done.err.count("no audit: ") == 1
    assert audits_of(store) == []


def test_what_is_no_number_is_told_and_not_kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "audit", lambda *args: made(kl_answer=float("nan")))
    done = kvtool("query", *AT, "--store", store, "--fusion", "reuse", *ALL).fine()
    assert "warning: an answer could not be audited: its distributions are no numbers" in done.err
    assert not (store / "audit").exists()


@pytest.mark.slow
def test_a_sampled_answer_is_measured_by_the_greedy_one(store: Path) -> None:
    at = ("query", *AT, "--store", store, "--fusion", "reuse", *ALL)
    kvtool(*at).fine()
    done = kvtool(*at, "--temperature", "2", "--seed", "3").fine()
    greedy, sampled = audits_of(store)
    assert (greedy.sampled, sampled.sampled) == (False, True)
    assert sampled.kl_answer == pytest.approx(greedy.kl_answer, abs=1e-9)
    assert sampled.answer_equal == greedy.answer_equal
    assert "as it would be without a temperature" in done.err


@pytest.mark.slow
def test_rounds_and_holes(store: Path) -> None:
    at = ("query", *AT, "--store", store, *ALL, "--documents", "mill1.md", "mill3.md")
    kvtool(*at, "--defer", "--set", "defer.threshold=9").fine()
    drop_records(store, *chunks_of(store, "mill3.md")[:1])
    for _ in range(2):  # the missing chunk is stored after the first answer
        kvtool(*at).fine()
    rounds, holed, filled = audits_of(store)
    assert rounds.tokens["prompt"] == holed.tokens["prompt"] == filled.tokens["prompt"]
    assert [audit.holes for audit in (rounds, holed, filled)] == [0, 1, 0]
    assert min(audit.kl_answer for audit in (rounds, filled)) > 0


def test_a_read_only_store_is_told_of_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", *[{"question": QUESTION}] * 3)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    done = kvtool("query", "--batch", batch, "--store", store, *SHORT, *ALL).fine()
    assert done.err.count("audits are stored next to the store, which cannot be written") == 1
    assert done.lines[-1]["audited"] == 0
    assert not (store / "audit").exists()


def ask(cache: api.Cache, **options: Any) -> Any:
    return cache.query(QUESTION, max_tokens=4, fusion="reuse", audit=1, **options)


def test_the_caller_has_the_answer_first(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, threads, inner = threading.Event(), [], module.audit

    def slowly(*args: Any) -> Audit:
        threads.append(threading.current_thread())
        assert may_go.wait(30)
        return inner(*args)

    monkeypatch.setattr(module, "audit", slowly)
    with api.open(store) as cache:
        assert ask(cache).answer
        assert audits_of(store) == []  # the answer is there, the audit is not
        may_go.set()
    (audit,) = audits_of(store)  # closing has waited
    assert audit.fusion == "reuse"
    assert len(threads) == 1


def test_every_answer_is_audited_before_the_next_is_given(store: Path) -> None:
    with api.open(store) as cache:
        for number in range(3):
            assert len(audits_of(store)) <= number
            ask(cache)
            assert len(audits_of(store)) >= number
    assert len(audits_of(store)) == 3
    assert len({audit.kl_answer for audit in audits_of(store)}) == 1
