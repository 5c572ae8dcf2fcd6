"""`--verify`: the answer that stands is that of `--fusion full`, token by token, and costs the first token nothing."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.errors import UsageError
from kvtool.core.query.answer import PreparedAnswer
from kvtool.core.query.audit import compare
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from tests.cli.working import QUESTION, SHORT, kvtool, on_terminal, write_batch
from tests.wording import refused

OTHER = "What does the fifth mill grind?"
ASKING: dict[str, Any] = {"max_tokens": 20, "top_k": 3}


def test_what_stands_is_what_full_says(cache: package.Cache) -> None:
    corrected = 0
    for question in (QUESTION, OTHER):
        full = cache.query(question, fusion="full", **ASKING)
        for more in ({"fusion": "reuse"}, {"fusion": "epic"}, {"defer": False, "fusion": "union", "ratio": 1.0}):
            draft, pieces = cache.query(question, **more, **ASKING), list[str]()
            reply = cache.query(question, stream=pieces.append, verify=True, **more, **ASKING)
            assert (reply.generated.ids, reply.finish, reply.answer) == (full.generated.ids, full.finish, full.answer)
            assert "".join(pieces).strip() == draft.answer
            assert (reply.fusion, reply.tokens["reused"]) == (draft.fusion, draft.tokens["reused"])
            pairs = zip(draft.generated.ids, full.generated.ids, strict=False)
            verified = reply.verified
            assert verified.accepted == sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert verified.drafted == len(draft.generated.ids)
            assert verified.draft == (None if draft.answer == full.answer else draft.answer)
            assert reply.timing_ms["ttft"] == verified.timing_ms["first"] < verified.timing_ms["final"]
            assert (reply.generated.steps, draft.verified) == (draft.generated.steps, None)
            corrected += verified.draft is not None
    assert 0 < corrected < 6  # some stood, and some did not


def test_the_first_token_waits_for_nothing(cache: package.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full prefill begins after the draft's last token, in the draft's own memory."""
    happened, check = list[object](), PreparedAnswer.check

    def checked(prepared: PreparedAnswer, *args: Any) -> Any:
        verdict = check(prepared, *args)
        happened.append(verdict.exact.cache is prepared.outcome.fused.cache)
        return verdict

    monkeypatch.setattr(PreparedAnswer, "check", checked)
    reply = cache.query(QUESTION, stream=happened.append, verify=True, fusion="reuse", **ASKING)
    assert happened.pop() is True
    assert "".join(map(str, happened)).strip() == (reply.verified.draft or reply.answer)


def test_full_has_nothing_to_verify(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PreparedAnswer, "check")
    done = kvtool("query", QUESTION, "--store", store, *SHORT, "--fusion", "full", "--verify").fine()
    assert "verified: nothing to do, full computes as full prefill does" in done.err
    row = kvtool("query", QUESTION, "--store", store, *SHORT, "--fusion", "full", "--verify", "--json").fine().json
    assert row["verified"]["accepted"] == row["verified"]["drafted"] == row["tokens"]["generated"]
    assert (row["verified"]["corrected"], row["verified"]["timing_ms"]["prefill"]) == (False, 0)


def test_deferred_chunks_are_verified_too(cache: package.Cache) -> None:
    """What full prefill says is of the chunks that were loaded."""
    more: dict[str, Any] = {"defer": True, "set": {"defer.first": 1, "defer.threshold": 9.0}}
    reply = cache.query(QUESTION, fusion="reuse", verify=True, **more, **ASKING)
    assert len(reply.rounds) > 1
    places = tuple(chunk.id for chunk in reply.chunks)
    assert reply.generated.ids == cache.query(QUESTION, chunks=places, fusion="full", **ASKING).generated.ids


def test_a_terminal_shows_both_and_a_pipe_one(store: Path) -> None:
    asked = ("query", QUESTION, "--store", store, *SHORT)
    full, draft = (kvtool(*asked, "--fusion", mode).fine().out for mode in ("full", "reuse"))
    assert full != draft
    piped = kvtool(*asked, "--fusion", "reuse", "--verify").fine()
    assert piped.out == f"{full.strip()}\n"
    assert "tokens and goes on otherwise; " in piped.err
    shown = on_terminal(*asked, "--fusion", "reuse", "--verify").fine()
    assert shown.out.startswith(draft)
    assert shown.out.endswith(f"\n\ncorrected:\n{full.strip()}\n")
    row = kvtool(*asked, "--fusion", "reuse", "--verify", "--json").fine().json
    assert (row["answer"], row["verified"]["draft"]) == (full.strip(), draft.strip())
    stands = on_terminal(*asked, "--fusion", "union", "--ratio", "1", "--verify").fine()
    assert stands.out == full
    assert "verified: full prefill gives the same answer; " in stands.err


def test_what_cannot_be_verified_is_refused(store: Path, cache: package.Cache, tmp_path: Path) -> None:
    asked = ("query", QUESTION, "--store", store, *SHORT)
    kvtool(*asked, "--verify", "--temperature", "0.5").failed(2, "--verify and --temperature", "--temperature 0")
    kvtool(*asked, "--verify", "--compare", "reuse").failed(2, "--compare", "--no-verify")
    with refused(UsageError):
        compare(cache._open_session(), Request(QUESTION), QueryOptions(verify=True), ["reuse"])
    config = tmp_path / "kvtool.toml"
    config.write_text("[query]\nverify = true\n", "utf-8")
    row = kvtool(*asked, "--config", config, "--json", "--audit", "1").fine()
    assert "verified" in row.json
    assert "no audit: a verified answer" in row.err


def test_a_batch_sums_up(store: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", {"question": QUESTION}, {"question": OTHER})
    asked = ("query", "--batch", batch, "--store", store, *SHORT, "--fusion", "reuse", "--verify")
    *rows, summary = kvtool(*asked).fine().lines
    right = [not row["verified"]["corrected"] for row in rows]
    assert summary["uncorrected_share"] == sum(right) / 2
    assert 0 <= summary["accepted_share"] <= 1
    assert summary["verified_ms_median"] > summary["ttft_ms_median"]


def test_a_conversation_goes_on_from_the_exact_rows(cache: package.Cache) -> None:
    full, talk = cache.conversation(fusion="full", **ASKING), cache.conversation(fusion="reuse", verify=True, **ASKING)
    for question in (QUESTION, "And when?", OTHER):
        expected, reply = full.ask(question), talk.ask(question)
        assert reply.generated.ids == expected.generated.ids
        assert reply.tokens["prompt"] == expected.tokens["prompt"]
        assert reply.verified is not None
    assert talk.tokens == full.tokens
    draft = cache.conversation(fusion="reuse", **ASKING)
    draft.ask(QUESTION)
    with refused(UsageError):
        draft.ask(OTHER, QueryOptions(verify=True, fusion="reuse", **ASKING))
    assert draft.ask(OTHER).verified is None


def test_an_interrupted_answer_is_verified_as_far_as_it_came(cache: package.Cache) -> None:
    full, talk = cache.conversation(fusion="full", **ASKING), cache.conversation(fusion="reuse", verify=True, **ASKING)
    left = iter(range(5))
    reply = talk.ask(QUESTION, going=lambda: next(left, None) is not None)
    assert 1 < len(reply.generated.ids) < 20
    assert reply.generated.ids == full.ask(QUESTION).generated.ids[: len(reply.generated.ids)]
    assert reply.generated.finish == "stop"
