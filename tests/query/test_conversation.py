"""Conversations over a store: earlier turns are neither repeated nor computed again, and outlive a failed question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import ContextFullError, KvtoolError, UsageError
from kvtool.core.query.conversation import Conversation
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from tests.wording import refused

FIRST, SECOND = "Who built the third mill?", "What does the fifth mill grind?"
ASKING: dict[str, Any] = {"max_tokens": 6, "top_k": 3}


def test_a_follow_up_computes_itself_alone(cache: package.Cache) -> None:
    talk = cache.conversation(**ASKING)
    first = talk.ask(FIRST)
    assert first.tokens["resident"] == 0
    before = talk.tokens
    assert before > first.tokens["prompt"]
    again = talk.ask(Request(FIRST, search=FIRST))  # finds what the prompt has
    assert not again.chunks
    assert {chunk.id for chunk in again.resident_chunks} == {chunk.id for chunk in first.chunks}
    assert {chunk.status for chunk in again.resident_chunks} == {"resident"}
    assert again.places == first.places
    assert again.bytes_read == again.tokens["reused"] == again.tokens["recomputed"] == 0
    assert again.tokens["resident"] == before
    assert max(again.fused.tokens.rows) == again.tokens["fresh"] == again.tokens["prompt"] - before
    third = talk.ask(Request(SECOND, search=SECOND))
    new = {chunk.id for chunk in third.chunks}
    assert new
    assert not new & {chunk.id for chunk in first.chunks}
    assert third.tokens["reused"] + third.tokens["recomputed"] == sum(chunk.tokens for chunk in third.chunks)
    assert [turn.question for turn in talk.turns] == [FIRST, FIRST, SECOND]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "union"])
def test_its_prompt_is_all_turns_as_the_template_has_them(mode: str, corpus: Path, tiny: Path, tmp_path: Path) -> None:
    """In `full`, and in `union` at ratio 1, the next token is that of plain `transformers` after the same text."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with package.open(tmp_path / "exact", model=str(tiny)) as cache:  # whose beginning of a prompt is not rounded
        cache.ingest(corpus, chunk_tokens=64, store_dtype="float32")
        talk = cache.conversation(fusion=mode, ratio=1.0, **ASKING)
        talk.ask(FIRST)
        reply = talk.ask(SECOND)
        session = cache._open_session()
        text = session.tokenizer.decode(reply.fused.plan.text_ids)
    assert text.count("<|user|>") == text.count("<|assistant|>") == 2
    assert text.count("<|system|>") == 1
    question, turn = text.index(f"Question: {FIRST}"), text.index("<|user|>", text.index(FIRST))
    assert question < text.index("</s>", question) < turn < text.index(f"Question: {SECOND}")
    with torch.inference_mode():
        expected = model(torch.tensor([reply.fused.plan.text_ids])).logits[0, -1]
    assert float((reply.fused.logits - expected).abs().max()) <= 1e-4


def test_a_question_that_finds_nothing_is_asked_of_what_stands(cache: package.Cache) -> None:
    talk = cache.conversation(**ASKING)
    with refused(KvtoolError):
        talk.ask("xyzzy")
    assert not talk.turns
    talk.ask(FIRST)
    reply = talk.ask(Request("xyzzy?", search="xyzzy"))
    assert not reply.chunks
    assert reply.tokens["resident"] > 0


@pytest.mark.slow
def test_documents_and_modes_may_change_between_turns(cache: package.Cache) -> None:
    talk = cache.conversation(**ASKING)
    talk.ask(FIRST, QueryOptions(fusion="auto", **ASKING))
    by_name = talk.ask(Request(SECOND, documents=("mill4.md",)), QueryOptions(fusion="epic", link_tokens=2, **ASKING))
    assert {Path(chunk.source).name for chunk in by_name.chunks} == {"mill4.md"}
    assert by_name.fusion == "epic"
    assert by_name.tokens["recomputed"] <= 2 * len(by_name.chunks)
    last = talk.ask(Request("And the first mill?", documents=("mill0.md", "mill4.md")), QueryOptions(fusion="auto"))
    assert {Path(chunk.source).name for chunk in last.chunks} == {"mill0.md"}
    assert {Path(chunk.source).name for chunk in last.resident_chunks} == {"mill4.md"}
    assert last.fusion == "union"


def test_what_fails_or_is_interrupted_leaves_it_as_it_was(cache: package.Cache) -> None:

    class Stop(Exception):
        pass

    def stop(piece: str) -> None:
        raise Stop

    calm, rough = cache.conversation(**ASKING), cache.conversation(**ASKING)
    calm.ask(FIRST)
    rough.ask(FIRST)
    for what in (UsageError, Stop):
        with pytest.raises(what):
            rough.ask(SECOND, QueryOptions(system="another", **ASKING) if what is UsageError else None, stop)
    assert len(rough.turns) == 1
    a, b = calm.ask(SECOND), rough.ask(SECOND)
    assert a.generated.ids == b.generated.ids
    assert torch.equal(a.fused.logits, b.fused.logits)
    assert a.tokens == b.tokens


def test_an_answer_that_is_ended_stands_as_far_as_it_was_said(cache: package.Cache) -> None:
    talk, left = cache.conversation(**ASKING), [True, True]
    reply = talk.ask(FIRST, going=lambda: bool(left and left.pop()))
    assert len(reply.generated.ids) == 3
    assert reply.generated.end is None
    assert talk.ask(SECOND).tokens["resident"] > reply.tokens["prompt"] + 3


def test_a_full_context_is_said_and_makes_room(cache: package.Cache) -> None:
    talk = cache.conversation(**ASKING)
    talk.ask(FIRST)
    with refused(ContextFullError):
        talk.ask(SECOND, QueryOptions(max_tokens=2000))
    standing = talk.tokens
    assert talk.ask(SECOND).tokens["resident"] >= standing
    talk.start_over()
    assert talk.tokens == 0
    reply = talk.ask("And when?")
    assert reply.tokens["resident"] == 0
    assert reply.turn["number"] == 1
    assert "fifth mill" in reply.turn["search"]
    talk.reset()
    assert talk.ask("And when was the first mill built?").turn["search"] == "And when was the first mill built?"


def test_several_conversations_go_on_beside_each_other(cache: package.Cache) -> None:
    one, other = cache.conversation(**ASKING), cache.conversation(**ASKING)
    one.ask(FIRST)
    other.ask(SECOND)
    alone = cache.conversation(**ASKING)
    alone.ask(FIRST)
    assert torch.equal(one.ask("When?").fused.logits, alone.ask("When?").fused.logits)


def test_it_starts_over_with_a_word_where_the_store_was_opened_anew(store: Path) -> None:
    said: list[str] = []
    with package.open(store, warn=lambda text, hint: said.append(text)) as cache:
        talk = cache.conversation(**ASKING)
        talk.ask(FIRST)
        cache._release()
        reply = talk.ask(SECOND)
        assert reply.tokens["resident"] == 0
        assert "the conversation starts over" in said[-1]
    with refused(UsageError):
        talk.ask(SECOND)


def another_instruction(store: Path) -> None:
    with Store.open(store) as opened, opened.writer() as writer:
        manifest = opened.manifest()
        changed = {"prefix": [*manifest["identity"]["prefix"], 7], "system": "Other."}
        writer.set_manifest(manifest | {"identity": manifest["identity"] | changed})


def level_made_anew(store: Path) -> None:
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level(opened.chunk_ids(), "4")
    compress(store, CompressOptions(levels=("4",), fit=True, fit_prompts=3, questions=0))


@pytest.mark.slow
@pytest.mark.parametrize("change", [another_instruction, level_made_anew])
def test_what_stands_is_made_anew_of_another_instruction_or_other_records(
    store: Path, change: Callable[[Path], None]
) -> None:
    compress(store, CompressOptions(levels=("4",), fit_prompts=1, questions=0))
    options = QueryOptions(level="4", fusion="reuse", **ASKING)
    told = list[str]()
    with package.open(store, warn=lambda text, hint: told.append(text)) as cache:
        session = cache._open_session()
        talk = Conversation.over(session, options, by_text=True)
        first = talk.ask(FIRST)
        change(store)
        second = talk.ask(SECOND)
        expected = Conversation.over(session, options, by_text=True)
        expected.give(session, Request(FIRST, search=FIRST), first.answer)
        assert torch.equal(second.fused.logits, expected.ask(SECOND).fused.logits)
    assert any("computed again" in text for text in told)
    assert second.turn["number"] == 2


def test_new_documents_leave_what_stands(store: Path, tmp_path: Path) -> None:
    with package.open(store) as cache:
        talk = cache.conversation(**ASKING)
        talk.ask(FIRST)
        standing = talk.tokens
        (tmp_path / "other.md").write_text("Who built the third mill? Baker Z built the third mill.", "utf-8")
        cache.ingest(tmp_path / "other.md")
        assert talk.ask(SECOND).tokens["resident"] == standing


def test_what_cannot_be_gone_through_anew_starts_over(store: Path) -> None:
    told = list[str]()
    with package.open(store, warn=lambda text, hint: told.append(text)) as cache:
        talk = Conversation.over(cache._open_session(), QueryOptions(**ASKING))
        chunks = [chunk.id for chunk in talk.ask(Request(FIRST, documents=("mill2.md",))).chunks]
        with Store.open(store) as opened, opened.writer() as writer:
            (path,) = [entry.path for entry in opened.files() if entry.path.endswith("mill2.md")]
            writer.remove_file(path)
            writer.drop_chunks([bytes.fromhex(chunk) for chunk in chunks])
        assert talk.ask(SECOND).tokens["resident"] == 0
    assert any("starts over" in text for text in told)
