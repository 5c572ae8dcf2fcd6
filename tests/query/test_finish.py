"""Ends of answers: by the model, at their longest, where they repeat themselves, where a base model asks itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.errors import UsageError
from kvtool.core.model.prompt import turn_header
from kvtool.core.model.tokens import encode
from kvtool.core.query.answer import load_and_fuse
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, PREFIX, QUESTION, kvtool, write_batch, write_corpus
from tests.families import save_tiny
from tests.fusion.making import tokenizer
from tests.wording import refused

ONCE = "The mill was built by Anna Reeve, who came from Brennick with two mules."
LOOP = " ".join([ONCE] * 4)
LONG = ("--max-tokens", "400")


def test_an_answer_says_how_it_ended(store: Path, says: Callable[[str], None]) -> None:
    says(ONCE)
    done = kvtool("query", QUESTION, "--store", store, "--json", *LONG).fine().json
    assert (done["answer"], done["finish"]) == (ONCE, "stop")
    done = kvtool("query", QUESTION, "--store", store, "--max-tokens", "5").fine()
    assert "cut at 5 tokens: --max-tokens" in done.err
    assert "--max-tokens" not in done.out
    cut = kvtool("query", QUESTION, "--store", store, "--max-tokens", "5", "--json").fine().json
    assert cut["finish"] == "length"
    assert done.out.strip() == cut["answer"]
    assert "cut at" not in kvtool("query", QUESTION, "--store", store, *LONG).fine().err


def test_a_loop_ends_where_it_begins(store: Path, says: Callable[[str], None]) -> None:
    """Without this, the answer would repeat itself until `--max-tokens`."""
    says(LOOP)
    done = kvtool("query", QUESTION, "--store", store, *LONG).fine()
    assert done.out.strip() == ONCE
    assert "--set sampling.stop_repeats=no" in done.err
    asked = ("query", QUESTION, "--store", store, "--json", *LONG)
    row = kvtool(*asked).fine().json
    assert (row["answer"], row["finish"]) == (ONCE, "repeat")
    assert row["tokens"]["generated"] == len(encode(tokenizer(), ONCE))
    whole = kvtool(*asked, "--set", "sampling.stop_repeats=no").fine().json
    assert (whole["answer"], whole["finish"]) == (LOOP, "stop")


@pytest.mark.slow
def test_modes_that_are_compared_say_all(store: Path, tmp_path: Path, says: Callable[[str], None]) -> None:
    says(LOOP)
    runs = kvtool("query", QUESTION, "--store", store, "--compare", "reuse", "--json", *LONG).fine().json["runs"]
    assert [(run["answer"], run["finish"]) for run in runs] == [(LOOP, "stop")] * 2
    batch = write_batch(tmp_path / "batch.jsonl", {"question": QUESTION})
    first, _ = kvtool("query", "--batch", batch, "--store", store, "--jsonl", *LONG).fine().lines
    assert (first["answer"], first["finish"]) == (ONCE, "repeat")


def test_an_audit_takes_a_loop_for_the_answer_that_it_is(store: Path, says: Callable[[str], None]) -> None:
    """Full prefill's own answer continues after the point where the other was ended."""
    says(LOOP)
    done = kvtool("query", QUESTION, "--store", store, "--fusion", "reuse", "--audit", "1", *LONG).fine()
    assert "same answer in full prefill" in done.err


@pytest.mark.slow
def test_a_turn_that_looped_stands_without_the_loop(store: Path, says: Callable[[str], None]) -> None:
    says(LOOP)
    with package.open(store) as cache:
        talk = cache.conversation(max_tokens=400, top_k=2)
        pieces: list[str] = []
        reply = talk.ask(QUESTION, on_text=pieces.append)
        assert "".join(pieces).strip() == reply.answer == ONCE
        before = talk.tokens
        header = turn_header(tokenizer())
        assert before == reply.tokens["prompt"] + len(encode(tokenizer(), ONCE)) + len(header)
        assert talk.ask("And when?").tokens["resident"] == before


@pytest.mark.slow
@pytest.mark.parametrize("behind", ["\n\nQuestion: Who else?\nAnswer: Nobody.", "\nQuestion:"])
def test_a_base_model_does_not_ask_itself(behind: str, tmp_path: Path, says: Callable[[str], None]) -> None:
    """Without a chat template nothing ends its turn: it would continue with a question of its own."""
    model = save_tiny("llama", tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = model / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    folder, store = write_corpus(tmp_path / "in", 2), tmp_path / "store"
    kvtool("ingest", folder, "--store", store, "--model", model, *CHUNKS, *PREFIX).fine()
    says(f" {ONCE}{behind}")
    done = kvtool("query", QUESTION, "--store", store, "--json", *LONG).fine().json
    assert (done["answer"], done["finish"]) == (ONCE, "stop")
    assert kvtool("query", QUESTION, "--store", store, *LONG).fine().out.strip() == ONCE
    run = kvtool("query", QUESTION, "--store", store, "--compare", "reuse", "--json", *LONG).fine().json["runs"][0]
    assert run["answer"] == ONCE


def test_a_stream_is_a_function(store: Path) -> None:
    with package.open(store) as cache, refused(UsageError):
        cache.query(QUESTION, stream=True)  # type: ignore[arg-type]


def test_an_answer_limited_by_the_context_alone_reserves_no_more_than_it_may_need(store: Path) -> None:
    with Store.open(store) as opened:
        session = Session.open(opened)
        options = QueryOptions(max_tokens=10**9, clamp=True)
        begun = load_and_fuse(session, lay_out(session, Request(QUESTION), options), options)
        cache, length = begun.outcome.fused.cache, begun.outcome.fused.plan.length
        assert {buffer.keys.shape[2] - length for buffer in cache.buffers} == {1024}
        session.close()
