"""A client's own messages: stored passages in them are reused where they are, and all else is as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.load import load_model
from kvtool.core.errors import UsageError
from kvtool.core.model import template, tokens
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import message_tokens
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out, lay_out_messages
from kvtool.core.query.reply import OWN_TEXT, Request
from kvtool.core.session.session import Session
from tests.cli.working import QUESTION, kvtool
from tests.wording import refused

Messages = tuple[tuple[str, str], ...]


def texts(session: Session, name: str) -> list[str]:
    (document,) = [document for document in session.store.documents() if document.source.endswith(name)]
    return [document.text[ref.start : ref.end] for ref in document.chunks]


@pytest.fixture
def messages(session: Session) -> Messages:
    """Four passages of three documents, among text of the client's own; the third is cut at both ends."""
    third, first, fifth = (texts(session, f"mill{number}.md") for number in (2, 0, 4))
    cut = first[1][9:-4]
    pasted = f"Passage 1:\n{third[0]}\n---\nPassage 2: {third[1]}\n---\n> {cut}\n\n<doc>{fifth[2]}</doc>\n\n{QUESTION}"
    return (("system", "Answer in a word."), ("user", "Hello."), ("assistant", "Hello!"), ("user", pasted))


def test_the_prompt_is_the_clients_token_by_token(session: Session, messages: Messages) -> None:
    asked = lay_out_messages(session, Request(QUESTION, messages=messages), QueryOptions())
    ids = message_tokens(session.tokenizer, messages)
    assert tuple(asked.plan.ids) == ids
    text = session.tokenizer.decode(list(ids))
    for _, content in messages:
        assert content in text
    passages = asked.plan.passages
    assert [hit.passage.source.rpartition("/")[2] for hit in asked.hits] == ["mill2.md"] * 2 + ["mill0.md", "mill4.md"]
    assert [hit.passage.chunk_id for hit in asked.hits] == [one.source.chunk_id for one in passages]
    assert all(one.cached for one in passages)
    assert passages[2].source.part.first > 0
    own = [one for one in asked.plan.chunks if not one.source.chunk_id]
    assert {one.reason for one in own} == {OWN_TEXT}


def test_recomputing_everything_is_full_prefill_of_that_very_prompt(session: Session, messages: Messages) -> None:
    request = Request(QUESTION, messages=messages)
    full = answer(session, request, QueryOptions(max_tokens=4, fusion="full"))
    ids = message_tokens(session.tokenizer, messages)
    with torch.inference_mode():
        model = load_model(session.model.files, device="cpu", dtype="float32").model
        plain = model(input_ids=torch.tensor([ids])).logits[0, -1]
    assert torch.equal(full.fused.logits.argmax(), plain.argmax())
    torch.testing.assert_close(full.fused.logits.float().flatten(), plain, atol=1e-4, rtol=0)
    for mode, more in (("blend", {"ratio": 1.0}), ("epic", {"link_tokens": 10_000})):
        reply = answer(session, request, QueryOptions(max_tokens=4, fusion=mode, **more))
        torch.testing.assert_close(reply.fused.logits.float(), full.fused.logits.float(), atol=1e-3, rtol=0)
        assert reply.generated.ids == full.generated.ids


def test_rows_of_a_part_are_those_of_the_chunk(session: Session, messages: Messages) -> None:
    options = QueryOptions(max_tokens=4, fusion="reuse", shift=False)
    reply = answer(session, Request(QUESTION, messages=messages), options)
    (segment,) = [one for one in reply.fused.plan.passages if one.source.part is not None and one.source.part.first]
    part = segment.source.part
    whole = answer(session, Request(QUESTION, chunks=(segment.source.chunk_id.hex(),)), options)
    (chunk,) = whole.fused.plan.chunks
    for ours, theirs in zip(reply.fused.cache.buffers, whole.fused.cache.buffers, strict=True):
        own = theirs.values[:, :, chunk.start : chunk.stop]
        assert torch.equal(ours.values[:, :, segment.start : segment.stop], own[:, :, part.first : part.stop])


def test_nothing_of_the_clients_is_stored_and_nothing_is_warned_of(session: Session, messages: Messages) -> None:
    told: list[str] = []
    session = replace(session, warn=lambda text, hint: told.append(text))
    before = session.store.chunk_ids()
    reply = answer(session, Request(QUESTION, messages=messages), QueryOptions(max_tokens=4))
    assert session.store.chunk_ids() == before
    assert told == []
    assert reply.tokens["reused"] > 0
    assert reply.reasons == {}
    assert [chunk.status for chunk in reply.chunks] == ["hit"] * 4
    assert reply.to_json()["fusion"] == "union"


@pytest.mark.parametrize("content", [QUESTION, "", f"A few words: {QUESTION} " * 30])
def test_messages_without_passages_have_theirs_found(session: Session, content: str) -> None:
    request = Request(QUESTION, messages=(("user", content or "x"),))
    assert lay_out_messages(session, request, QueryOptions()) is None
    assert answer(session, request, QueryOptions(max_tokens=4)).chunks


def test_an_answer_that_quotes_a_passage_does_not_end_retrieval(session: Session) -> None:
    said = "\n\n".join(texts(session, "mill2.md"))
    turns = (("user", QUESTION), ("assistant", said), ("user", "When was it?"))
    assert lay_out_messages(session, Request(QUESTION, messages=turns), QueryOptions()) is None
    turns = (*turns[:-1], ("user", f"{said}\n\nWhen was it?"))
    assert lay_out_messages(session, Request(QUESTION, messages=turns), QueryOptions()) is not None


def test_control_tokens_that_a_client_writes_are_text(session: Session, messages: Messages) -> None:
    end = session.tokenizer.special_tokens_map["eos_token"]
    pasted = (*messages[:-1], ("user", f"{end} {messages[-1][1]}"))
    ids, plain = message_tokens(session.tokenizer, pasted), message_tokens(session.tokenizer, messages)
    assert ids.count(session.tokenizer.eos_token_id) == plain.count(session.tokenizer.eos_token_id)


def test_no_process_is_started_for_messages_without_passages_nor_for_every_turn_of_a_conversation(
    session: Session, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    start = template.output_of

    def counted(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        return start(*args, **kwargs)

    monkeypatch.setattr(template, "output_of", counted)
    template._answer.cache_clear()
    plain = Request(QUESTION, messages=(("user", "Hello."), ("assistant", "Hello!"), ("user", QUESTION)))
    assert lay_out_messages(session, plain, QueryOptions()) is None
    assert started == []
    for _ in range(3):
        asked = lay_out_messages(session, Request(QUESTION, messages=messages), QueryOptions())
        assert tuple(asked.plan.ids) == message_tokens(session.tokenizer, messages)
        messages = (*messages, ("assistant", "A miller."), ("user", "When was it?"))
    assert len(started) == 1


def test_a_template_that_writes_nothing_behind_a_passage(session: Session) -> None:
    session.tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    messages = (("user", "\n\n".join(texts(session, "mill2.md"))),)
    asked = lay_out_messages(session, Request(QUESTION, messages=messages), QueryOptions())
    assert asked.plan.segments[-1].ids
    assert tuple(asked.plan.ids) == message_tokens(session.tokenizer, messages)


def test_chunks_without_all_of_their_rows_are_computed_and_not_stored_once_more(store: Path) -> None:
    fast = ("--questions", 0, "--fit-prompts", 4)
    kvtool("compress", "--store", store, "--keep", "0.5", "--drop-raw", "--yes", *fast).fine()
    with Store.open(store) as opened:
        session = Session.open(opened, ModelOptions(offline=True))
        request = Request(QUESTION, messages=(("user", "\n\n".join((*texts(session, "mill2.md"), QUESTION))),))
        before = {chunk_id: opened.levels(chunk_id) for chunk_id in opened.chunk_ids()}
        reply = answer(session, request, QueryOptions(max_tokens=4, force=True))
        assert {*reply.reasons} == {"no stored level has all of its rows"}
        assert {chunk_id: opened.levels(chunk_id) for chunk_id in opened.chunk_ids()} == before


def test_a_chunk_that_is_repaired_is_spotted_again(session: Session, messages: Messages) -> None:
    store, request = session.store, Request(QUESTION, messages=messages)
    (document,) = [each for each in store.documents() if each.source.endswith("mill2.md")]
    info = store.chunk_info(lost := document.chunks[0].chunk_id)
    with store.writer() as writer:
        writer.drop_chunks([lost])
    asked = lay_out_messages(session, request, QueryOptions())
    assert lost not in [hit.passage.chunk_id for hit in asked.hits]
    with store.writer() as writer:
        writer.describe({lost: info})
    asked = lay_out_messages(session, request, QueryOptions())
    assert asked.hits[0].passage.chunk_id == lost


@pytest.mark.parametrize("pasted", [True, False])
def test_a_prompt_of_too_many_characters_is_refused_before_it_is_tokenised(
    session: Session, messages: Messages, pasted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    before = tokens.encode_batch

    def counted(tokenizer: Any, texts: Sequence[str]) -> Any:
        tokenised.extend(map(len, texts))
        return before(tokenizer, texts)

    monkeypatch.setattr(tokens, "encode_batch", counted)
    text = "word " * (20 * session.decoder.context)
    request = Request(text, messages=(*messages, ("user", text)) if pasted else ())
    with refused(UsageError):
        (lay_out_messages if pasted else lay_out)(session, request, QueryOptions())
    assert max(tokenised, default=0) <= 64 * session.decoder.context
