"""Turns of a conversation over requests that bring all of them: cached or recomputed, the answer is the same."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import ContextFullError, KvtoolError, KvtoolWarning, UsageError
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.conversation import Conversation
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.conversations import _NOT_HELD
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event, TooSlowError, Turns
from kvtool.serve.options import ServeOptions
from tests.serve import conftest
from tests.serve.conftest import KEY, PATIENCE, Served, serving, turned
from tests.wording import refused

QUESTIONS = (
    "Who built the third mill?",
    "What does the fifth mill grind?",
    "And when was that?",
    "And the second one?",
)
CHAT = "/v1/chat/completions"
PLENTY = 10**9
SHORT = QueryOptions(max_tokens=6, top_k=2)


class Client:
    def __init__(self, store: Path, keep: int = PLENTY) -> None:
        self.warnings: list[str] = []
        options = ServeOptions(keep_conversations=keep)
        self.engine = Engine(store, ModelOptions(), lambda text, _: self.warnings.append(text), options)
        self.engine.start()

    def ask(self, question: str, turns: Turns = (), options: QueryOptions = SHORT, **request: Any) -> Answer:
        return conftest.ask(self.engine, Ask(Request(question, **request), options, turns=turns))

    def talk(self, questions: tuple[str, ...] = QUESTIONS, options: QueryOptions = SHORT) -> tuple[Turns, list[Answer]]:
        turns: Turns = ()
        answers = []
        for question in questions:
            answers.append(self.ask(question, turns, options))
            turns = (*turns, (question, answers[-1].text))
        return turns, answers

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


@pytest.fixture
def client(ready: Path) -> Iterator[Client]:
    with Client(ready) as made:
        yield made


def counts(answer: Answer) -> tuple[int, int]:
    return answer.facts["turn"]["cached"], answer.facts["turn"]["restored"]


@pytest.mark.parametrize("fusion", ["union", "epic", "full", "blend"])
def test_what_is_kept_and_what_is_not_answer_the_same(ready: Path, fusion: str) -> None:
    options = replace(SHORT, fusion=fusion)
    with Client(ready) as one, Client(ready, keep=0) as other:
        turns, kept = one.talk(options=options)
        again, anew = other.talk(options=options)
        assert len(one.engine.conversations) == 1
        assert one.engine.conversations.nbytes > 0
        assert len(other.engine.conversations) == 0
    assert turns == again
    for number, (answer, other_answer) in enumerate(zip(kept, anew, strict=True), 1):
        turn, its = answer.facts["turn"], other_answer.facts["turn"]
        assert turn["number"] == its["number"] == number
        assert turn["search"] == its["search"]
        assert answer.facts["tokens"]["prompt"] == other_answer.facts["tokens"]["prompt"]
        assert [chunk.id for chunk in answer.chunks] == [chunk.id for chunk in other_answer.chunks]
        assert turn["cached"] + turn["restored"] == answer.facts["tokens"]["resident"]
        assert its["cached"] == 0
        assert answer.places == other_answer.places != ()
    for answer in kept[1:]:
        kept_tokens, again_tokens = counts(answer)
        assert kept_tokens > 0
        assert again_tokens < 40  # the answer as its text has it, and the template between two turns
        assert "reason" not in answer.facts["turn"]
    assert [answer.facts["turn"].get("reason") for answer in anew] == [None, *[_NOT_HELD] * 3]


def test_it_is_the_conversation_of_a_chat(ready: Path, client: Client) -> None:
    """Its answers are in the prompt as their text is tokenised, since a client sends only text."""
    turns, _ = client.talk()
    with kvtool.open(ready) as cache:
        talk = Conversation.over(cache._open_session(), SHORT, by_text=True)
        assert tuple((question, talk.ask(question).answer) for question in QUESTIONS) == turns


def test_another_earlier_turn_is_another_conversation(client: Client) -> None:
    turns, answers = client.talk()
    (first, _), *later = turns[:-1]
    changed = client.ask(QUESTIONS[-1], ((first, "nobody"), *later))
    assert changed.facts["turn"]["reason"] == _NOT_HELD
    assert counts(changed)[0] == 0
    regenerated = client.ask(QUESTIONS[-1], turns[:-1])
    assert regenerated.text == answers[-1].text
    assert regenerated.facts["turn"]["reason"] == _NOT_HELD
    other = client.ask("What else?", turns, replace(SHORT, fusion="full"))
    assert other.facts["turn"]["reason"] == _NOT_HELD
    # The first one is still cached, untouched by the others, and how an answer is drawn does not matter.
    on = client.ask("What else?", turns, replace(SHORT, temperature=1.0, seed=3))
    assert counts(on)[0] > 0
    more = client.ask("What else?", (*turns, ("What else?", on.text), ("Really?", "Yes.")))
    assert more.facts["turn"]["reason"] == f"what is held ends with turn {len(turns) + 1}"
    assert counts(more)[0] > 0
    stranger = client.ask("What else?", (("Who?", "Me."),))
    assert stranger.facts["turn"]["reason"] == _NOT_HELD


def test_an_ingest_that_changes_nothing_found_keeps_it(store: Path, tmp_path: Path) -> None:
    with Client(store) as client:
        turns, _ = client.talk(QUESTIONS[:2])
        (tmp_path / "other.md").write_text("# Bees\n\nQueen and drones dance.", "utf-8")
        with kvtool.open(store) as cache:
            cache.ingest(tmp_path / "other.md")
        still = client.ask(QUESTIONS[2], turns)
        assert counts(still)[0] > 0
        turns = (*turns, (QUESTIONS[2], still.text))
        (tmp_path / "third.md").write_text("Who built the third mill? " * 3 + "Baker Z built the third mill.", "utf-8")
        with kvtool.open(store) as cache:
            cache.ingest(tmp_path / "third.md")
        changed = client.ask(QUESTIONS[3], turns)
        with Client(store, keep=0) as other:
            assert other.ask(QUESTIONS[3], turns).text == changed.text
    assert changed.facts["turn"]["reason"] == "other passages are found now, or read otherwise"


def another_instruction(store: Path) -> None:
    with Store.open(store) as opened, opened.writer() as writer:
        manifest = opened.manifest()
        prefix = [*manifest["identity"]["prefix"], 7]
        writer.set_manifest(manifest | {"identity": manifest["identity"] | {"prefix": prefix, "system": "Other."}})


def another_lead_in(store: Path) -> None:
    """Ingest the same texts after another lead-in: the same token ids under other chunk ids."""
    with kvtool.open(store) as cache:
        files = [entry.path for entry in cache._open_session().store.files()]
        with refused(KvtoolWarning):
            cache.ingest(files, chunk_tokens=64, lead_in="none")


def level_made_anew(store: Path) -> None:
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level(opened.chunk_ids(), "4")
    compress(store, CompressOptions(levels=("4",), fit=True, fit_prompts=3, questions=0))


@pytest.mark.some(1)
@pytest.mark.parametrize("change", [another_instruction, another_lead_in, level_made_anew])
def test_nothing_is_held_of_what_would_be_laid_otherwise_now(store: Path, change: Callable[[Path], None]) -> None:
    compress(store, CompressOptions(levels=("4",), fit_prompts=1, questions=0))
    options = replace(SHORT, fusion="reuse", level="auto" if change is another_lead_in else "4")
    with Client(store) as client:
        turns, _ = client.talk(QUESTIONS[:2], options)
        change(store)
        changed = client.ask(QUESTIONS[2], turns, options)
        assert counts(changed)[0] == 0
        assert changed.facts["turn"]["reason"] == "other passages are found now, or read otherwise"
        with Client(store, keep=0) as other:
            assert other.ask(QUESTIONS[2], turns, options).text == changed.text


def test_what_was_not_asked_for_longest_goes_first(ready: Path) -> None:
    with Client(ready) as measuring:
        measuring.talk(QUESTIONS[:1])
        one = measuring.engine.conversations.nbytes
    with Client(ready, keep=int(2.5 * one)) as client:
        first, _ = client.talk(QUESTIONS[:1])
        client.talk(QUESTIONS[1:2])
        third, _ = client.talk(("Who built the first mill?",))
        assert len(client.engine.conversations) <= 2
        assert client.engine.conversations.nbytes <= 2.5 * one
        gone = client.ask("What else?", first)
        assert gone.facts["turn"]["reason"] == _NOT_HELD
        assert counts(client.ask("What else?", third))[0] > 0


@pytest.mark.parametrize("isolate", [True, False])
def test_each_key_has_its_own(ready: Path, isolate: bool) -> None:
    other = "kv-of-another-client"

    def kept(key: str) -> int:
        with served.client as client:
            answer = client.post(CHAT, json=sent, headers={"Authorization": f"Bearer {key}"}).json()
        return int(answer["kvtool"]["turn"]["cached"])

    with serving(ready, key=f"{KEY}\n{other}", isolate=isolate) as served:
        with served.client as client:
            first = [{"role": "user", "content": QUESTIONS[0]}]
            said = client.post(CHAT, json={"messages": first, "max_tokens": 6}).json()["choices"][0]["message"]
        sent = {"messages": [*first, said, {"role": "user", "content": QUESTIONS[1]}], "max_tokens": 6}
        assert (kept(other) == 0) == isolate
        assert (kept(KEY) > 0) == isolate  # else the other one has continued it


def test_who_leaves_in_the_middle_finds_it_as_it_was(ready: Path, client: Client) -> None:
    turns, _ = client.talk(QUESTIONS[:2])
    with turned(client) as permits:
        permits.release(3)  # of eight tokens some cannot be there yet
        stream = conftest.stream(client.engine, Ask(Request(QUESTIONS[2]), replace(SHORT, max_tokens=8), turns=turns))
        next(stream)
        stream.close()
    after = client.ask(QUESTIONS[2], turns)
    with Client(ready, keep=0) as other:
        assert other.ask(QUESTIONS[2], turns).text == after.text
    assert counts(after)[0] > 0


def test_an_earlier_question_need_not_have_found_anything(client: Client) -> None:
    answer = client.ask(QUESTIONS[0], (("xyzzy", "I do not know."),))
    assert answer.chunks
    assert counts(answer) == (0, answer.facts["tokens"]["resident"])
    with refused(KvtoolError):
        client.ask("xyzzy")


def test_what_is_too_long_is_known_before_anything_is_computed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assistant's turn longer than the context: its rows would be computed only to be dropped."""
    rows: list[int] = []
    for name in ("fill_cache", "compute"):
        plain = getattr(Decoder, name)

        def counted(self: Decoder, tokens: Sequence[int], *args: Any, plain: Any = plain, **more: Any) -> Any:
            rows.append(len(tokens))
            return plain(self, tokens, *args, **more)

        monkeypatch.setattr(Decoder, name, counted)
    alone = client.ask(QUESTIONS[0], options=replace(SHORT, max_tokens=1))
    computed, rows[:] = sum(rows), []
    answer = client.ask(QUESTIONS[0], ((QUESTIONS[1], "word " * 20_000),), replace(SHORT, max_tokens=1))
    assert sum(rows) <= computed
    assert [text for text, _ in answer.warnings if "starts over" in text] != []
    assert answer.text == alone.text
    with refused(UsageError):
        client.ask("word " * 20_000)


@pytest.mark.slow
def test_turns_that_will_not_stand_are_not_computed(
    ready: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tuple((f"What of mill {number % 8}?", "word " * 300) for number in range(30))
    with kvtool.open(ready, warn=lambda text, hint: None) as cache:
        session = cache._open_session()
        talk = Conversation.over(session, SHORT, by_text=True)
        for question, said in long:
            talk.restarting(partial(talk.give, session, Request(question), said), session.warn)
        with suppress(ContextFullError):
            talk.begin(session, QUESTIONS[0])
            pytest.fail("the last question starts over, too")
        talk.start_over()
        expected = talk.ask(QUESTIONS[0])
    given, give = [0], Conversation.give

    def counted(self: Conversation, *args: Any) -> Any:
        given[0] += 1
        return give(self, *args)

    monkeypatch.setattr(Conversation, "give", counted)
    answer = client.ask(QUESTIONS[0], long)
    assert given[0] < 8
    assert answer.text == expected.answer
    assert answer.facts["tokens"]["prompt"] == expected.tokens["prompt"]
    assert answer.facts["turn"]["search"] == expected.turn["search"]
    assert answer.facts["turn"]["number"] == len(long) + 1


@pytest.mark.slow
def test_a_prompt_of_many_turns_lets_other_questions_begin(ready: Path) -> None:
    turns, ends = tuple((f"xyzzy {number}?", "No.") for number in range(60)), queue.SimpleQueue[tuple[str, Event]]()

    def told(name: str) -> Callable[[Event], None]:
        return lambda event: None if isinstance(event, str) else ends.put((name, event))

    engine = Engine(ready, ModelOptions(), lambda *_: None)
    engine.submit(Ask(Request(QUESTIONS[0]), SHORT, turns=turns, client=("one", "")), told("many"))
    for number in range(3):
        engine.submit(Ask(Request(QUESTIONS[1]), SHORT, client=(f"other {number}", "")), told("one"))
    engine.start()
    try:
        order = [ends.get(timeout=PATIENCE) for _ in range(4)]
    finally:
        engine.close()
    assert [name for name, _ in order] == ["one"] * 3 + ["many"]
    assert all(isinstance(event, Answer) for _, event in order)


def test_the_time_of_a_prompt_of_many_turns_ends(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give = Conversation.give
    with Client(ready) as client:
        client.ask(QUESTIONS[0])

        def slow(self: Conversation, *args: Any) -> Any:
            begun = give(self, *args)
            if len(self.turns) == 3:
                client.engine.scheduler._running[0].timeout = 0.0
            return begun

        monkeypatch.setattr(Conversation, "give", slow)
        turns = tuple((f"xyzzy {number}?", "No.") for number in range(20))
        with pytest.raises(TooSlowError):
            client.ask(QUESTIONS[0], turns)
        monkeypatch.setattr(Conversation, "give", give)
        again = client.ask(QUESTIONS[0], turns)
    assert again.facts["turn"]["reason"] == "what is held ends with turn 3"


def test_options_for_a_single_question_are_left_aside_with_a_word(client: Client) -> None:
    turns, _ = client.talk(QUESTIONS[:1])
    answer = client.ask(QUESTIONS[1], turns, replace(SHORT, defer=True))
    assert any("are ignored" in text for text, _ in answer.warnings)
    assert counts(answer)[0] > 0


def post(served: Served, *messages: tuple[str, str]) -> dict[str, Any]:
    with served.client as http:
        body = {"messages": [{"role": role, "content": text} for role, text in messages]}
        found = http.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        value: dict[str, Any] = found.json()
        return value


def test_over_http(ready: Path) -> None:
    with serving(ready, asking=SHORT) as served:
        first = post(served, ("user", QUESTIONS[0]))
        said = first["choices"][0]["message"]["content"]
        second = post(served, ("user", QUESTIONS[0]), ("assistant", said), ("user", QUESTIONS[1]))
        with served.client as http:
            health = http.get("/health").json()
    turn = second["kvtool"]["turn"]
    assert turn["cached"] > 0
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == turn["cached"] + second["kvtool"]["tokens"]["reused"]
    assert "earlier" in second["kvtool"]["timing_ms"]
    assert health["conversations"] == 1


def test_who_says_what_in_several_messages(ready: Path) -> None:
    with serving(ready, asking=SHORT) as served:
        greeted = post(served, ("assistant", "Hello!"), ("user", "hello"), ("user", QUESTIONS[0]))
        said = greeted["choices"][0]["message"]["content"]
        on = post(
            served,
            *(("assistant", "Hello!"), ("user", "hello"), ("user", QUESTIONS[0])),
            *(("assistant", said), ("user", QUESTIONS[1])),
        )
    assert greeted["kvtool"]["turn"]["number"] == 1
    assert on["kvtool"]["turn"]["number"] == 2
    assert on["kvtool"]["turn"]["cached"] > 0
