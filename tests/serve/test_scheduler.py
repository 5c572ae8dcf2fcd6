"""Turns of clients, refused questions, and prompts that yield to running answers between layers; counted, not timed."""

from __future__ import annotations

import itertools
import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvtool
from kvtool.core.errors import KvtoolError
from kvtool.core.model.generate import ContinuousBatch
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, BusyError, Event, FairQueue, Job, LeftError
from kvtool.serve.scheduler import Scheduler
from kvtool.serve.unix_socket import ask, connect, socket_path
from tests.cli.working import LAYERS, QUESTION
from tests.serve.conftest import PATIENCE, Served, of_shell, serving, turned, wait_until
from tests.serve.test_hostile import CHAT, body, posted


def job(user: str, name: str = "") -> Job:
    return Job(Ask(Request(name), QueryOptions(), client=("", user)), lambda event: None, 1.0)


def names(queue: FairQueue) -> list[str]:
    return [queue.take().ask.request.question for _ in range(len(queue))]


def filled(most: int, *questions: str) -> FairQueue:
    queue = FairQueue(most)
    for name in questions:
        assert queue.add(job(name[0], name)) is None
    return queue


def test_clients_take_turns_and_each_ones_questions_keep_their_order() -> None:
    queue = filled(9, "a1", "a2", "a3", "a4", "b1", "c1", "c2")
    assert [each.ask.request.question for each in queue] == ["a1", "a2", "a3", "a4", "b1", "c1", "c2"]
    assert names(queue) == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]
    assert len(queue) == 0
    assert not list(queue)


def test_who_leaves_gives_the_place_up() -> None:
    queue = filled(3, "a1", "b1", "a2")
    queue.remove(next(iter(queue)))
    queue.remove(next(each for each in queue if each.ask.client == ("", "b")))
    assert [len(queue), *names(queue)] == [1, "a2"]


def test_a_full_queue_turns_the_newest_of_the_longest_away() -> None:
    queue = filled(4, "a1", "a2", "a3", "b1")
    for coming, going in [("c1", "a3"), ("a4", "a4"), ("b2", "b2"), ("d1", "a2"), ("e1", "e1"), ("a5", "a5")]:
        last = queue.add(job(coming[0], coming))
        assert last is not None
        assert last.ask.request.question == going
        assert len(queue) == 4
    assert names(queue) == ["a1", "b1", "c1", "d1"]


def test_nobody_has_two_turns_between_two_of_another_who_waits() -> None:
    chance = random.Random(7)
    queue, served, waited = FairQueue(12), Counter[str](), dict[str, Counter[str]]()
    for _, step in itertools.product(range(3000), ("come", "come", "go")):
        if step == "come":
            queue.add(job(chance.choice("aaaaabbc")))
        elif len(queue):
            taken = queue.take().ask.client[1]
            served[taken] += 1
            here = {each.ask.client[1] for each in queue}
            waited = {other: turns for other, turns in waited.items() if other in here and other != taken}
            for other in here:
                turns = waited.setdefault(other, Counter())
                turns[taken] += other != taken
                assert max(turns.values()) <= 1
    assert max(served.values()) <= 2 * min(served.values())  # though one asks five times as often


def begun(served: Served, patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    scheduler: Scheduler = served.engine.scheduler
    begin = scheduler._begin

    def begins(job: Job) -> None:
        seen.append(job.ask.client)
        begin(job)

    patch.setattr(scheduler, "_begin", begins)
    return seen


def test_a_question_waits_for_one_of_each_client_and_not_for_all_of_one(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(store, asking=QueryOptions(max_tokens=2)) as served, turned(served) as permits:
        order, scheduler = begun(served, monkeypatch), served.engine.scheduler
        asked = []
        for user in ({"user": "ann"}, {"user": "ann"}, {"user": "ann"}, {}, {"safety_identifier": "bob"}):
            asked.append(posted(served, body(**user)))
            wait_until(lambda: scheduler.waiting == len(asked))
        connected = connect(socket_path(store))
        assert connected is not None
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(lambda: list(ask(connected, of_shell())))
            wait_until(lambda: scheduler.waiting == 6)
            permits.release(10**6)
            assert isinstance(beside.result()[-1], dict)
        for each in asked:
            with each:
                assert b"200 OK" in each.recv(4096)
    here = "127.0.0.1"
    assert order == [(here, "ann"), (here, ""), (here, "bob"), ("shell", ""), (here, "ann"), (here, "ann")]


def test_a_client_that_fills_the_queue_keeps_no_other_out(ready: Path) -> None:
    with serving(ready, queue=2) as served, turned(served) as permits:
        scheduler, many = served.engine.scheduler, []
        for _ in range(2):
            many.append(posted(served, body(user="many")))
            wait_until(lambda: scheduler.waiting == len(many))
        few = posted(served, body(user="few"))
        with many[0], many[1], few:
            assert b" 429 " in many[1].recv(4096)
            assert scheduler.waiting == 2
            with served.client as other:
                answer = other.post(CHAT, json=body(user="many"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
            permits.release(10**6)
            assert b"200 OK" in many[0].recv(4096)
            assert b"200 OK" in few.recv(4096)
        rows = served.logged(4)
    assert sorted(row["status"] for row in rows) == [200, 200, 429, 429]
    assert "many" not in str(rows)
    assert served.warnings == []


def test_who_has_left_takes_no_place_while_another_prompt_is_computed(ready: Path) -> None:
    with serving(ready, queue=2) as served, turned(served) as permits:
        scheduler = served.engine.scheduler
        for number in range(2):
            with posted(served, body(user=f"gone {number}")):
                wait_until(lambda: scheduler.waiting == 1)
            wait_until(lambda: scheduler.waiting == 0)  # no turn has ended meanwhile
        with posted(served, body()) as stays:
            wait_until(lambda: scheduler.waiting == 1)
            permits.release(10**6)
            assert b"200 OK" in stays.recv(4096)
        assert sorted(row["status"] for row in served.logged(3)) == [200, 499, 499]
    assert served.warnings == []


OTHER = "Who built the first mill?"
LONG, SHORT = QueryOptions(max_tokens=300, fusion="full"), QueryOptions(max_tokens=6, fusion="full")


@dataclass
class Watched:
    """An engine whose prompts yield before every layer; what it counts is by question. `meanwhile`: called at each."""

    engine: Engine
    heard: list[tuple[str, Event]] = field(default_factory=list)
    gave_way: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    meanwhile: Callable[[Job], None] = lambda job: None
    _ends: queue.SimpleQueue[tuple[str, Event]] = field(default_factory=queue.SimpleQueue)
    _now: str = "keeping"
    _started: bool = False

    def ask(self, question: str, options: QueryOptions) -> Job:
        def tell(event: Event) -> None:
            self.heard.append((question, event))
            if not isinstance(event, str):
                self._ends.put((question, event))

        return self.engine.submit(Ask(Request(question), options), tell)

    def asked(self, *asked: tuple[str, QueryOptions]) -> dict[str, Event]:
        for question, options in asked:
            self.ask(question, options)
        if not self._started:
            self._started = True
            self.engine.start()
        return self.ends(len(asked))

    def ends(self, count: int) -> dict[str, Event]:
        return dict(self._ends.get(timeout=PATIENCE) for _ in range(count))

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        scheduler = self.engine.scheduler
        begin, give_way, step = scheduler._begin, scheduler._run_others, ContinuousBatch.step

        def begins(job: Job) -> None:
            self._now = job.ask.request.question
            begin(job)
            self._now = "keeping"

        def gives_way(job: Job | None) -> None:
            self.gave_way[self._now] = self.gave_way.get(self._now, 0) + 1
            if job is not None:
                self.meanwhile(job)
            give_way(job)

        def steps(together: ContinuousBatch) -> Any:
            self.steps[self._now] = self.steps.get(self._now, 0) + 1
            return step(together)

        patch.setattr(scheduler, "_begin", begins)
        patch.setattr(scheduler, "_run_others", gives_way)
        patch.setattr(scheduler, "_is_time", lambda: True)
        patch.setattr(ContinuousBatch, "step", steps)


@contextmanager
def watched(store: Path, patch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(Engine(store, ModelOptions(), lambda text, hint: None))
    made.watch(patch)
    try:
        yield made
    finally:
        made.engine.close()


def alone(store: Path, question: str, options: QueryOptions) -> str:
    with kvtool.open(store) as cache:
        return cache.query(question, fusion=options.fusion, max_tokens=options.max_tokens).answer


def text_of(event: Event) -> str:
    assert isinstance(event, Answer), event
    return event.text


@pytest.mark.some(3)
@pytest.mark.parametrize("fusion", ["full", "blend", "epic", "infoflow", "union"])
def test_an_answer_goes_on_between_the_layers_of_anothers_prompt(
    ready: Path, monkeypatch: pytest.MonkeyPatch, fusion: str
) -> None:
    options = QueryOptions(max_tokens=6, fusion=fusion)
    with watched(ready, monkeypatch) as one:
        ends = one.asked((QUESTION, LONG), (OTHER, options))
    assert one.gave_way[OTHER] >= LAYERS
    assert one.steps[OTHER] == one.gave_way[OTHER]  # one before each layer, and none before the first prompt's
    assert QUESTION not in one.steps
    assert text_of(ends[QUESTION]) == alone(ready, QUESTION, LONG)
    assert text_of(ends[OTHER]) == alone(ready, OTHER, options)
    assert isinstance(ends[OTHER], Answer)
    assert ends[OTHER].others_ms > 0


def test_an_answer_that_ends_in_anothers_prompt_is_told_at_once(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = QueryOptions(max_tokens=3, fusion="full")
    with watched(ready, monkeypatch) as one:
        ends = one.asked((QUESTION, short), (OTHER, SHORT))
    order = [question for question, event in one.heard if isinstance(event, Answer)]
    first = next(number for number, (question, _) in enumerate(one.heard) if question == OTHER)
    assert order == [QUESTION, OTHER]
    assert one.heard[first - 1] == (QUESTION, ends[QUESTION])
    assert one.steps[OTHER] == 1  # the second token came at the end of its own turn
    assert text_of(ends[QUESTION]) == alone(ready, QUESTION, short)
    assert text_of(ends[OTHER]) == alone(ready, OTHER, SHORT)


def test_who_leaves_is_let_go_of_before_the_next_layer(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(ready, monkeypatch) as one:
        one.meanwhile = lambda job: one.engine.scheduler.leave(job) if one._now == OTHER else None
        ends = one.asked((QUESTION, LONG), (OTHER, SHORT))
        assert one.gave_way[OTHER] == 1
        one.meanwhile = lambda job: None
        assert text_of(one.asked((OTHER, SHORT))[OTHER]) == alone(ready, OTHER, SHORT)
    assert isinstance(ends[OTHER], LeftError)
    assert text_of(ends[QUESTION]) == alone(ready, QUESTION, LONG)


def test_what_goes_wrong_with_the_others_leaves_a_prompt_alone(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(ready, monkeypatch) as one:
        step, failed = ContinuousBatch.step, []

        def fails(together: ContinuousBatch) -> Any:
            if one._now == OTHER and not failed:
                failed.append(True)
                raise MemoryError
            return step(together)

        monkeypatch.setattr(ContinuousBatch, "step", fails)
        ends = one.asked((QUESTION, LONG), (OTHER, SHORT))
    assert isinstance(ends[QUESTION], KvtoolError)
    assert "memory" in ends[QUESTION].message
    assert text_of(ends[OTHER]) == alone(ready, OTHER, SHORT)


def test_what_goes_wrong_with_a_prompt_leaves_the_others_alone(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(ready, monkeypatch) as one:

        def fails(job: Job) -> None:
            if one._now == OTHER:
                raise ValueError("a layer has failed")

        one.meanwhile = fails
        ends = one.asked((QUESTION, LONG), (OTHER, SHORT))
    assert isinstance(ends[OTHER], KvtoolError)
    assert text_of(ends[QUESTION]) == alone(ready, QUESTION, LONG)


def test_an_end_does_not_wait_for_a_prompt(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(ready, monkeypatch) as one:
        scheduler: Scheduler = one.engine.scheduler
        one.meanwhile = lambda job: setattr(scheduler, "_stopped", True)
        assert isinstance(one.asked((QUESTION, LONG))[QUESTION], BusyError)
    assert one.gave_way == {QUESTION: 1}
