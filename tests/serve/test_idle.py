"""KV that questions missed is computed while none waits; a question waits for one layer of it at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve import idle
from kvtool.serve.idle import Interrupted
from kvtool.serve.job import Answer, Ask
from tests.cli.working import LAYERS, QUESTION, payloads
from tests.serve.conftest import Served, ask, serving, wait_until

BUSY: dict[str, Any] = {"idle_load": 1000.0}  # other tests run beside
QUICK = Ask(Request(QUESTION), QueryOptions(max_tokens=2, fusion="reuse"))


@pytest.fixture
def whole(store: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = payloads(store)
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level([*opened.chunk_ids()], "raw")
    return found


def statuses(answer: Answer) -> set[str]:
    return {chunk.status for chunk in answer.chunks}


def is_stored(served: Served) -> bool:
    return served.engine._loaded.missed == 0


def test_what_a_question_missed_is_stored_after_it(store: Path, whole: dict[Any, Any]) -> None:
    with serving(store, **BUSY) as served:
        first = ask(served.engine, QUICK)
        assert statuses(first) == {"miss"}
        wait_until(lambda: payloads(store) and is_stored(served))
        again = ask(served.engine, QUICK)
        assert statuses(again) <= {"hit", "exact"}
        assert served.warnings == []
    stored = payloads(store)
    assert stored.items() <= whole.items()
    assert len(stored) == (len(first.chunks) + 1) * LAYERS  # with the prompt's beginning


def test_all_of_a_store_is_computed_where_that_is_wanted(store: Path, whole: dict[Any, Any]) -> None:
    with serving(store, idle="all", **BUSY) as served:
        ask(served.engine, QUICK)
        wait_until(lambda: payloads(store) == whole)


def test_a_question_ends_the_work_before_the_next_layer(
    store: Path, whole: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[int] = []
    with serving(store, idle="none", **BUSY) as served:
        first = ask(served.engine, QUICK)
        session, work = served.engine._loaded.session(), served.engine.scheduler._idle
        wait_until(lambda: session.missed)
        assert session.missed is not None
        wanted = dict(session.missed)

        def pause() -> None:
            layers.append(len(layers))
            if len(layers) > 2:
                raise Interrupted

        work.step(lambda: session, pause)
        assert (len(layers), session.missed) == (3, wanted)
        assert payloads(store) == {}
        monkeypatch.setattr(idle, "on_battery", lambda: True)
        work.step(lambda: session, lambda: None)
        assert session.missed == wanted
        monkeypatch.undo()
        with kvtool.open(store) as cache:
            cache.remove(first.chunks[0].source)  # what is removed does not come back
        while session.missed:
            work.step(lambda: session, lambda: None)
        removed = {chunk.id for chunk in first.chunks if chunk.source == first.chunks[0].source}
        assert {key[0] for key in payloads(store)} == {chunk.hex() for chunk in wanted} - removed


def test_nothing_is_stored_over_the_budget(store: Path, whole: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_AGAIN_S", 0.1)
    with kvtool.open(store) as cache:
        cache.set_budget(1000)
    with serving(store, **BUSY) as served:
        ask(served.engine, QUICK)
        wait_until(lambda: served.engine.scheduler._idle._full_s > 0.1)
        assert payloads(store) == {}
        with kvtool.open(store) as cache:
            cache.set_budget(None)
        wait_until(lambda: is_stored(served))
