"""Fair turns of several clients, and the requests that are refused where too many wait; counted, not timed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask, FairQueue, Job
from kvtool.serve.scheduler import Scheduler
from kvtool.serve.unix_socket import ask, connect, socket_path
from tests.serve.conftest import Served, of_shell, serving, turned, wait_until
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
