"""Passages that come again are learned: computed once after an answer, and reused for the client that sent them."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.layout import folder_bytes
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import RAW
from kvtool.core.common.files import cache_dir
from kvtool.core.errors import KvtoolError, NoSpaceError, StoreLockedError, UsageError
from kvtool.core.ingest.job import create
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out_messages
from kvtool.core.query.reply import Request
from kvtool.core.session.learned import LearnedStore
from kvtool.core.session.session import Session
from kvtool.serve.auth import owner_of
from kvtool.serve.engine import Engine
from kvtool.serve.job import Ask
from kvtool.serve.learning import Learner, SeenTexts
from kvtool.serve.options import ServeOptions
from tests.cli.working import QUESTION, break_record
from tests.serve.conftest import KEY, PATIENCE, Served, serving, wait_until
from tests.wording import refused

OTHER = "kv-of-another-client"
BOTH = f"{KEY}\n{OTHER}"
WORDS = (
    "harbour lighthouse keeper granite timber slate diary lantern winter captain copper bridge meadow orchard merchant "
    "tower garden letter mirror barley cellar thunder market anchor ribbon pepper engine violin saddle candle"
).split()


def passage(name: str) -> str:
    """A text of eighty words, in sentences of nine, that is in no store and has no run in common with others."""
    words = random.Random(name).choices(WORDS, k=72)
    return " ".join(" ".join(["The", name, *words[at : at + 9]]) + "." for at in range(0, len(words), 9))


ARNE, BRIX, CORD = map(passage, ("Arne", "Brixham", "Cordelia"))


def asked(served: Served, texts: Sequence[str], question: str = QUESTION, key: str = KEY, **own: Any) -> Any:
    pasted = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
    messages = [{"role": "system", "content": f"Use these.\n\n{pasted}"}, {"role": "user", "content": question}]
    with httpx2.Client(base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE) as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "kvtool": own})
    assert answer.status_code == 200, answer.text
    wait_until(lambda: not served.engine.scheduler.learning)
    return answer.json()


def teach(served: Served, text: str, key: str = KEY) -> None:
    for _ in range(2):
        asked(served, [text], key=key)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def sources(answer: Any) -> set[str]:
    return {chunk["source"].partition(":")[0] for chunk in answer["kvtool"]["chunks"]}


def learned(store: Path) -> Path:
    with Store.open(store) as opened:
        return cache_dir() / "learned" / opened.uuid


def learned_by(store: Path) -> Counter[str]:
    with Store.open(learned(store)) as opened:
        return Counter(source.partition("/")[0] for source in opened.sources())


def look(learner: Learner, session: Session, *texts: str) -> None:
    learner.add(Request("", messages=tuple(("user", text) for text in texts), owner="all"))
    learner.step(lambda: session)


def queued(learner: Learner, session: Session, text: str) -> int:
    """Send a text twice; returns how many steps its chunks take."""
    before = len(learner)
    for _ in range(2):
        look(learner, session, text)
    return len(learner) - before


def learn_all(learner: Learner, session: Session) -> LearnedStore:
    while len(learner):
        learner.step(lambda: session)
    assert session.learned is not None
    return session.learned


@contextmanager
def learning(store: Path, budget: int = 10**9, dtype: str = "auto") -> Iterator[tuple[Session, LearnedStore]]:
    with Store.open(store) as opened:
        session = Session.open(opened, ModelOptions(dtype=dtype)).with_learning(budget)
        assert session.learned is not None
        yield session, session.learned
        session.close()


@pytest.fixture
def session(store: Path) -> Iterator[Session]:
    with learning(store) as (session, _):
        yield session


def test_the_third_request_with_the_same_passages_reuses_them(store: Path) -> None:
    with serving(store, learn=True) as served:
        first = asked(served, [ARNE, BRIX])
        assert (cached(first), first["kvtool"]["chunks"]) == (0, [])
        second = asked(served, [BRIX, CORD, ARNE], "Which harbour is the oldest of them?")
        assert cached(second) == 0
        third = asked(served, [CORD, ARNE, BRIX], "Who kept a diary?")
        assert sources(third) == {"learned"}
        assert {chunk["status"] for chunk in third["kvtool"]["chunks"]} == {"hit"}
        taken, prompt = sum(chunk["tokens"] for chunk in third["kvtool"]["chunks"]), third["usage"]["prompt_tokens"]
        assert 0.5 * prompt < taken < 0.75 * prompt  # two of three passages came before
        assert 0.7 * taken < cached(third) <= taken
        assert prompt == asked(served, [CORD, ARNE, BRIX], "Who kept a diary?", fusion="full")["usage"]["prompt_tokens"]
        assert served.warnings == []
    with serving(store, learn=True) as served:  # another process, later
        assert cached(asked(served, [ARNE])) > 0
    with serving(store) as served:
        assert "learned" not in sources(asked(served, [ARNE]))


def test_each_key_has_its_own(store: Path) -> None:
    with serving(store, key=BOTH, learn=True) as served:
        teach(served, ARNE)
        assert cached(asked(served, [ARNE])) > 0
        assert cached(asked(served, [ARNE], key=OTHER)) == 0
        with Store.open(learned(store)) as opened:
            before = {*opened.chunk_ids()}
        assert cached(asked(served, [ARNE], key=OTHER)) == 0  # that one came again only now
        assert cached(asked(served, [ARNE], key=OTHER)) > 0
        with Store.open(learned(store)) as opened:
            assert {*opened.chunk_ids()} > before  # a copy of its own: no time tells that there is another one
            assert len(opened.chunk_ids()) == len(opened.sources()) == 2 * len(before)
    with serving(store, key=BOTH, learn=True, isolate=False) as served:
        asked(served, [BRIX])
        asked(served, [BRIX], key=OTHER)
        assert cached(asked(served, [BRIX])) > 0
        assert cached(asked(served, [BRIX], key=OTHER)) > 0


def test_metrics_are_for_the_first_key(store: Path) -> None:
    """They count the tokens that are reused, of all keys together: whose passages were learned."""
    for isolate, expected in ((True, [200, 403]), (False, [200, 200])):
        with serving(store, key=BOTH, learn=True, isolate=isolate) as served:
            headers = [{"Authorization": f"Bearer {key}"} for key in (KEY, OTHER)]
            answers = [httpx2.get(f"{served.url}/metrics", headers=header) for header in headers]
        assert [answer.status_code for answer in answers] == expected
        assert ("kvtool_tokens" in answers[1].text) is not isolate


def test_nothing_of_it_is_found_listed_or_named(store: Path) -> None:
    with serving(store, learn=True) as served:
        teach(served, ARNE)
        (chunk, *_) = asked(served, [ARNE])["kvtool"]["chunks"]
        with served.client as client:
            listed = client.get("/v1/documents").json()["data"]
            assert all("mill" in row["source"] for row in listed)
            for name in (chunk["source"], chunk["id"]):
                assert client.get("/v1/documents", params={"source": name}).status_code == 404, name
            body = {"messages": [{"role": "user", "content": f"{QUESTION} The Arne harbour lighthouse keeper?"}]}
            found = client.post("/v1/chat/completions", json=body | {"max_tokens": 2}).json()
            assert "learned" not in sources(found)
            named = body | {"kvtool": {"chunks": [chunk["id"]]}}
            assert client.post("/v1/chat/completions", json=named).status_code == 400


def test_what_was_ingested_is_not_learned_and_spot_false_learns_nothing(store: Path) -> None:
    with Store.open(store) as opened:
        texts = [each.text for each in opened.documents() if each.source.endswith(("mill1.md", "mill4.md"))]
    with serving(store, learn=True) as served:
        for _ in range(3):
            assert "learned" not in sources(asked(served, texts))
            asked(served, [ARNE], spot=False)
        with Store.open(learned(store)) as opened:
            assert opened.chunk_ids() == []


@pytest.mark.slow
def test_the_least_recently_used_are_evicted_within_the_budget(store: Path) -> None:
    budget = 3 * 10**6
    with serving(store, learn=True, learn_budget=budget) as served:
        for text in (ARNE, *(passage(f"Town{number}") for number in range(12))):
            teach(served, text)
            assert folder_bytes(learned(store)) <= budget
        assert cached(asked(served, [text])) > 0
        assert cached(asked(served, [ARNE])) == 0
        assert served.warnings == []
    with serving(store, learn=True, learn_budget=budget // 2) as served:
        teach(served, BRIX)
        assert folder_bytes(learned(store)) <= budget // 2
        assert cached(asked(served, [BRIX])) > 0
        assert served.warnings == []
    with serving(store, learn=True, learn_budget=10_000) as served:
        teach(served, CORD)
        assert cached(asked(served, [CORD])) == 0
        assert "a passage could not be learned" in served.warnings[0]


@pytest.mark.slow
def test_a_start_trims_to_its_budget_and_its_keys(store: Path) -> None:
    with serving(store, key=BOTH, learn=True) as served:
        for text, key in product([ARNE, BRIX, CORD], [KEY, OTHER]):
            teach(served, text, key=key)
    folder = learned(store)

    def bytes_of(text: str) -> int:
        return sum(path.read_bytes().count(text.encode()) for path in folder.rglob("data.mdb"))

    assert bytes_of("Arne") > 0
    with serving(store, key=None, learn=True) as served:  # of no key: all stay
        before = learned_by(store)
        assert set(before) == {owner_of(KEY), owner_of(OTHER)}
    size = folder_bytes(folder)
    with serving(store, key=OTHER, learn=True) as served:
        assert learned_by(store) == {owner_of(OTHER): before[owner_of(OTHER)]}
        assert folder_bytes(folder) < 0.8 * size
        assert cached(asked(served, [ARNE], key=OTHER)) > 0
    size = folder_bytes(folder)
    with serving(store, key=OTHER, learn=True, learn_budget=size) as served:
        assert learned_by(store) == {owner_of(OTHER): before[owner_of(OTHER)]}  # all of it fits
    with serving(store, key=OTHER, learn=True, learn_budget=3 * size // 4) as served:
        assert folder_bytes(folder) <= 3 * size // 4
        assert 0 < learned_by(store)[owner_of(OTHER)] < before[owner_of(OTHER)]
        assert served.warnings == []
    with serving(store, key=OTHER, learn=True, learn_budget=1) as served:
        assert learned_by(store) == {}
    assert bytes_of("Arne") == 0


def test_a_damaged_record_is_computed_in_place_and_dropped_when_nobody_writes(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtool.core.session.learned._LOCK_WAIT", 0.0)
    with serving(store, learn=True, memory_cache=0) as served:
        teach(served, ARNE)
        first, *others = asked(served, [ARNE])["kvtool"]["chunks"]
        chunk_id = bytes.fromhex(first["id"])
        break_record(learned(store), first["id"], 1)
        with Store.open(learned(store)) as other:
            with other.writer():
                again = asked(served, [ARNE])
            assert [chunk["status"] for chunk in again["kvtool"]["chunks"]] == ["miss", *("hit" for _ in others)]
            assert cached(again) > 0
            assert chunk_id in other.chunk_ids()
            asked(served, [ARNE])
            assert chunk_id not in other.chunk_ids()
        with Store.open(store) as opened:
            assert chunk_id not in opened.chunk_ids()
        assert {text.partition(":")[0] for text in served.warnings} <= {"a learned passage was computed in place"}
        teach(served, ARNE)
        assert {chunk["status"] for chunk in asked(served, [ARNE])["kvtool"]["chunks"]} == {"hit"}


def test_another_arithmetic_has_chunks_of_its_own(store: Path) -> None:
    ids = tuple(range(100, 200))
    described, marks = list[str](), list[bytes | None]()
    for dtype in ("float32", "bfloat16", "float32"):
        with learning(store, dtype=dtype) as (session, own):
            if len(marks) < 2:
                assert own.spot(ids, "all") == []
                own.put("all", own.wanted("all", ids), "A text.")
            (span,) = own.spot(ids, "all")
            info = own.store.chunk_info(span.chunk_id)
            assert info is not None
            assert info.arithmetic == session.decoder.loaded.arithmetic
            described.append(info.arithmetic.dtype)
            marks.append(own.store.record_mark(span.chunk_id, RAW, 0))
    assert described == ["float32", "bfloat16", "float32"]
    assert marks[0] == marks[2] != marks[1]


def test_nothing_is_computed_without_room_or_while_another_writes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = list[Sequence[Any]]()
    monkeypatch.setattr("kvtool.core.session.learned.make", lambda decoder, lead_ins, chunks: computed.append(chunks))
    with learning(store, 10_000) as (_, own):
        chunk = own.wanted("all", tuple(range(100, 200)))
        with pytest.raises(NoSpaceError):
            own.put("all", chunk, "A text.")
        with Store.open(learned(store)) as other, other.writer(), pytest.raises(StoreLockedError):
            own.put("all", chunk, "A text.")
    assert computed == []


def test_a_conversation_at_the_end_of_the_context_starts_over(session: Session) -> None:
    long = QueryOptions(max_tokens=session.decoder.context)
    request = Request(QUESTION, messages=(("user", ARNE), ("assistant", "Yes."), ("user", QUESTION)), owner="all")
    assert lay_out_messages(session, request, long) is None
    with pytest.raises(UsageError):
        lay_out_messages(session, replace(request, messages=request.messages[:1]), long)


def test_what_declines_to_learn(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError):
        ServeOptions(learn=True, spot=False)
    with Store.open(store) as opened:
        session = Session.open(opened)
        session.state.identity = replace(session.identity, keeps_states=True)
        with refused(UsageError):
            session.with_learning(10**9)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file"))
    engine = Engine(store, ModelOptions(), lambda text, hint: None, ServeOptions(learn=True))
    with refused(KvtoolError):
        engine.start()
    engine.close()


def test_the_oldest_waiting_requests_and_chunks_are_dropped(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.serve.learning._CHUNKS", 2)
    learner = Learner()
    for name in range(70):
        learner.add(Request("", messages=(("user", passage(f"Town{name}")),), owner="all"))
    assert len(learner) == 64
    learn_all(learner, session)
    assert queued(learner, session, ARNE) == 2  # of three or more


def test_nothing_is_stored_behind_another_lead_in_than_its_id_says(session: Session) -> None:
    """An ingest may change the store's lead-in while passages wait; what was learned before is found after it again."""
    learned = session.learned
    assert learned is not None
    learner, mine = Learner(), session.identity
    other = replace(mine, lead_in=replace(mine.lead_in, ids=(5, 6, 7)))
    chunk = learned.wanted("all", tuple(range(40, 100)))
    learned.put("all", chunk, "A text.")
    assert queued(learner, session, ARNE) > 1
    learned.identity = other
    assert learned.spot(chunk.ids, "all") == []
    learn_all(learner, session)
    assert learned.store.chunk_ids() == [chunk.chunk_id]
    learned.identity = mine
    assert [span.chunk_id for span in learned.spot(chunk.ids, "all")] == [chunk.chunk_id]


@pytest.mark.parametrize("error", [NoSpaceError("full"), StoreLockedError("locked"), MemoryError(), ValueError()])
def test_a_passage_that_fails_is_left_to_its_next_time_and_others_go_on(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Of one that is too large, longer ones would fare alike. So it is where the queue is full, too."""
    learned = session.learned
    assert learned is not None
    monkeypatch.setattr("kvtool.serve.learning._LEAST", 20)  # a chunk alone comes again
    tried, failing = list[int](), set[int]()

    def put(owner: str, chunk: ChunkSpec, text: str) -> None:
        tried.append(len(chunk.ids))
        if len(tried) in failing:
            raise error

    def tries() -> list[int]:
        nonlocal learner
        learner = Learner()
        tried.clear()
        assert queued(learner, session, ARNE) > 2
        while len(learner):
            with suppress(type(error)):
                learner.step(lambda: session)
        return list(tried)

    monkeypatch.setattr(learned, "put", put)
    learner = Learner()
    sizes = tries()
    monkeypatch.setattr("kvtool.serve.learning._CHUNKS", len(sizes))
    failing.add(1)
    tries()
    shorter = [sizes[0], *(size for size in sizes[1:] if size <= sizes[0])]
    assert tried == (shorter if isinstance(error, NoSpaceError) else sizes)
    look(learner, session, ARNE)
    assert len(learner) > 0


def test_what_another_server_has_stored_meanwhile_is_not_stored_again(session: Session) -> None:
    """Servers cut a passage by what they saw of it, so the chunks of one differ from those of the other."""
    one, other = Learner(), Learner()
    for learner, text in ((one, ARNE), (other, " ".join(ARNE.split()[5:]))):
        assert queued(learner, session, text) > 1
    counts = [len(learn_all(learner, session).store.chunk_ids()) for learner in (one, other)]
    assert counts[0] == counts[1] > 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [NoSpaceError("the disk is full"), OSError("read-only")])
def test_a_compaction_that_a_start_could_not_do_is_done_by_the_next(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with serving(store, key=BOTH, learn=True) as served:
        for key, text in ((KEY, ARNE), (OTHER, BRIX)):
            teach(served, text, key=key)

    def is_there() -> bool:
        return any(b"Arne" in path.read_bytes() for path in learned(store).rglob("data.mdb"))

    def full(self: Writer) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "compact", full)
        with serving(store, key=OTHER, learn=True) as served:
            pass
    assert "could not be trimmed" in served.warnings[0]
    assert (set(learned_by(store)), is_there()) == ({owner_of(OTHER)}, True)
    with serving(store, key=OTHER, learn=True) as served:
        assert not is_there()
    assert served.warnings == []


def test_a_store_that_replaces_another_is_answered_from_where_it_cannot_learn(
    store: Path, comets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Session, budget: int, owners: object = None) -> None:
        raise KvtoolError("the disk is full")

    with serving(store, learn=True) as served:
        asked(served, [ARNE])
        monkeypatch.setattr(Session, "with_learning", full)
        store.rename(tmp_path / "old")
        shutil.move(comets, store)
        assert "not learned: the disk is full" in str(asked(served, [])["kvtool"]["warnings"])


def test_learned_passages_that_are_replaced_meanwhile_are_not_used(store: Path) -> None:
    with serving(store, learn=True) as served:
        teach(served, ARNE)
        assert cached(asked(served, [ARNE])) > 0
        shutil.rmtree(learned(store))
        Store.create_or_open(learned(store)).close()
        answer = asked(served, [ARNE])
        assert cached(answer) == 0
        assert "no learned passages are used" in str(answer["kvtool"]["warnings"])


def test_only_what_another_process_added_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with learning(store) as (_, one), learning(store) as (_, other):
        for first in range(3):
            ids = tuple(range(60 * first, 60 * first + 60))
            other.put("all", other.wanted("all", ids), "A text.")
        reads = list[Any]()
        for name in ("file_at", "chunk_info"):
            real = getattr(one.store, name)
            monkeypatch.setattr(one.store, name, lambda key, real=real: [reads.append(key), real(key)][1])
        assert one.spot(range(200, 400), "all") == []
        assert len(reads) == 6
        other.put("all", other.wanted("all", tuple(range(200, 300))), "A text.")
        reads.clear()
        assert len(one.spot(range(200, 400), "all")) == 1
        assert len(reads) == 3  # the file, the chunk, and the chunk that the prompt has
        other.forget({other.wanted("all", tuple(range(200, 300))).chunk_id})
        reads.clear()
        assert one.spot(range(200, 400), "all") == []
        assert reads == []


def test_parts_of_texts_that_came_before() -> None:
    seen, text = SeenTexts(), list(range(1000, 1600))
    assert seen.take(text) == []
    seen.add([text[:300], text[300:], range(50)])
    assert seen.take([*text[400:500], 7, *text[100:163], 8, *text[100:164]]) == [(0, 100), (165, 229)]
    seen.add([text])
    assert seen.take([*range(9), *text, *range(9)]) == [(9, 609)]


def test_what_came_again_has_to_come_twice_again() -> None:
    seen, text = SeenTexts(), list(range(1000, 1600))
    seen.add([text])
    assert seen.take(text[200:300]) == [(0, 100)]
    assert seen.take(text[200:300]) == []
    assert seen.take(text) == [(0, 200), (300, 600)]
    assert seen.take(text) == []
    assert seen._tokens == 0


def test_texts_that_came_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.serve.learning._REMEMBERED", 250)
    seen = SeenTexts()
    for first in (0, 1000, 2000):
        seen.add([range(first, first + 100)])
    assert [bool(seen.take(range(first, first + 100))) for first in (0, 1000, 2000)] == [False, True, True]


def test_it_learns_only_while_there_is_nothing_to_answer(store: Path) -> None:
    engine = Engine(store, ModelOptions(), lambda text, hint: None, ServeOptions(learn=True))
    scheduler, request = engine.scheduler, Request(QUESTION, messages=(("user", ARNE),), owner="all")
    assert scheduler._learner is not None
    scheduler._learner.add(request)
    assert scheduler._can_learn
    job = scheduler.submit(Ask(request, QueryOptions()), lambda event: None)
    assert not scheduler._can_learn
    assert scheduler._next() is job  # it runs
    assert not scheduler._can_learn
    scheduler._end(job, KvtoolError("done"))
    assert scheduler._can_learn
    engine.close()


def test_a_level_that_is_asked_for_forgets_nothing(store: Path) -> None:
    with serving(store, learn=True) as served:
        teach(served, ARNE)
        served.warnings.clear()
        finer = asked(served, [ARNE], level="2")
        assert {chunk["status"] for chunk in finer["kvtool"]["chunks"]} == {"miss"}
        assert served.warnings == []
        assert cached(asked(served, [ARNE])) > 0


def test_a_program_that_retrieves_by_itself_needs_no_ingest(tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    create(empty, IngestOptions(model=str(tiny), chunk_tokens=64, lead_in="prefix"))
    with serving(empty, learn=True) as served:
        teach(served, ARNE)
        assert cached(asked(served, [ARNE])) > 0
