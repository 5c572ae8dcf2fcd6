"""Stored passages in a request's token ids, how it wants them fused, and the salt of its blocks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.retrieval.index import index_of
from kvtool.vllm import requests
from kvtool.vllm.requests import PassageSpotter
from kvtool.vllm.worker import Load
from tests.cli.working import CHUNKS, kvtool
from tests.vllm.imitation import OWN, QUESTION, prompt_of
from tests.wording import refused

Said = list[tuple[str, str]]


def spotter_of(store: Path, said: Said | None = None, **settings: Any) -> PassageSpotter:
    config, warn = {"store": str(store), **settings}, lambda *what: None if said is None else said.append(what)
    return PassageSpotter(config, warn, patience=60)


def salt(store: Path, ids: list[int], wish: object = None, **settings: Any) -> str:
    found = spotter_of(store, **settings).find(ids, wish)
    assert found is not None
    return found.salt


def test_passages_are_found_where_they_are_pasted(store: Path) -> None:
    ids, places = prompt_of(store)
    found = spotter_of(store).find(ids)
    assert found is not None
    assert [(span.start, span.stop) for span in found.spans] == places
    assert found.options.mode() == "union"


def test_a_prompt_without_passages_is_left_alone(store: Path) -> None:
    said: Said = []
    assert spotter_of(store, said).find([*OWN * 40, *QUESTION]) is None
    assert spotter_of(store, said).find([]) is None
    assert said == []


def test_a_request_says_how_it_is_fused(store: Path) -> None:
    ids, _ = prompt_of(store)
    spotter = spotter_of(store, fusion="epic", link_tokens=4)

    def options(wish: object) -> QueryOptions:
        found = spotter.find(ids, wish)
        assert found is not None
        return found.options

    assert (options(None).mode(), options(None).link_tokens) == ("epic", 4)
    assert options("reuse").mode() == "reuse"
    assert options({"fusion": "blend", "ratio": 0.5}).ratio == 0.5
    assert spotter.find(ids, False) is None
    assert spotter.find(ids, "full") is None


@pytest.mark.parametrize("settings", [{"fusion": "auto"}, {"fusion": "mixed"}, {"top_k": 3}, {"ratio": 7}])
def test_a_wrong_setting_is_refused_at_the_start_and_reported_of_a_request(store: Path, settings: Any) -> None:
    with refused(UsageError) as caught:
        spotter_of(store, **settings)
    said: Said = []
    ids, _ = prompt_of(store)
    assert spotter_of(store, said).find(ids, settings) is None
    assert len(said) == 1
    assert caught.value.message in said[0][0]


def test_a_wish_of_any_kind_is_reported_and_ends_nothing(store: Path) -> None:
    said: Said = []
    spotter, (ids, _) = spotter_of(store, said), prompt_of(store)
    assert [spotter.find(ids, wish) for wish in (5, 0, [1], {"ratio": 10**400})] == [None] * 4
    assert len(said) == 4


@pytest.mark.parametrize(
    ("wish", "recomputed"),
    [
        ("reuse", lambda lengths: 0),
        ({"fusion": "epic", "link_tokens": 5}, lambda lengths: 5 * len(lengths)),
        ({"fusion": "blend", "ratio": 0.1}, sum),  # all rows pass its first layers
        ({"fusion": "union", "ratio": 0.25}, lambda lengths: -(-sum(lengths) // 4)),
        ({"fusion": "infoflow", "ratio": 1}, sum),
        ("prefix", sum),
    ],
    ids=["reuse", "epic", "blend", "union", "infoflow", "prefix"],
)
def test_prompts_with_more_rows_than_a_step_are_left_to_vllm(store: Path, wish: object, recomputed: Any) -> None:
    ids, places = prompt_of(store)
    lengths = [stop - start for start, stop in places]
    rows = len(ids) - sum(lengths) + recomputed(lengths)
    spotter, fewer = (PassageSpotter({"store": str(store)}, lambda *_: None, most, 60) for most in (rows, rows - 1))
    assert spotter.find(ids, wish) is not None
    assert fewer.find(ids, wish) is None


def test_an_index_that_takes_long_holds_up_no_request(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _ = prompt_of(store)
    may_end, made = Event(), list[int]()

    def slow(*given: Any) -> Any:
        assert may_end.wait(60)
        made.append(1)
        return index_of(*given)

    monkeypatch.setattr(requests, "index_of", slow)
    spotter = PassageSpotter({"store": str(store)}, lambda *_: None, patience=0.01)
    assert [spotter.find(ids), spotter.find(ids), made] == [None, None, []]  # it would wait for ever
    may_end.set()
    deadline = time.monotonic() + 60
    while spotter.find(ids) is None:
        assert time.monotonic() < deadline
    may_end.clear()
    with Store.open(store) as opened, opened.writer() as writer:
        writer.remove_documents([opened.sources()[-1]])
    assert spotter.find(ids) is not None  # by the index before
    assert made == [1]
    may_end.set()


def test_a_store_that_was_replaced_is_opened_anew(
    store: Path, built: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Said = []
    ids, _ = prompt_of(store)
    kvtool("ingest", built / "corpus", "--store", tmp_path / "other", "--model", tiny, *CHUNKS).fine()
    monkeypatch.setattr(Store, "revision", lambda self: 7)  # as if it were the same one's
    spotter = spotter_of(store, said)
    first = spotter.find(ids)
    shutil.rmtree(store)
    (tmp_path / "other").rename(store)
    again = spotter.find(ids)
    assert first is not None
    assert again is not None
    assert (first.spans, said) == (again.spans, [])
    assert first.salt != again.salt


def test_a_store_that_is_not_there_is_reported(tmp_path: Path) -> None:
    said: Said = []
    with refused(UsageError):
        PassageSpotter({}, lambda *_: None)
    assert spotter_of(tmp_path / "none", said).find(list(range(99))) is None
    assert "no store" in said[0][0]


def test_blocks_of_other_modes_options_questions_and_revisions_have_other_names(store: Path) -> None:
    ids, _ = prompt_of(store)
    other = [*ids[: -len(QUESTION)], *reversed(QUESTION)]
    assert salt(store, ids) == salt(store, ids)
    assert salt(store, ids) != salt(store, other)  # which rows union recomputes depends on the question
    for mode in ("reuse", "epic", "blend"):
        assert salt(store, ids, mode) == salt(store, other, mode)
    ways = [None, "reuse", "epic", "blend", "infoflow", {"ratio": 0.3}, {"shift": False}, {"level": "lossless"}]
    assert len({salt(store, ids, way) for way in ways}) == len(ways)
    before = salt(store, ids, "reuse")
    with Store.open(store) as opened, opened.writer() as writer:
        writer.remove_documents([opened.sources()[-1]])
    assert salt(store, ids, "reuse") != before


def test_a_load_names_the_blocks_that_it_writes() -> None:
    load = Load((), (), QueryOptions(), first=32, stop=70, blocks=(9, 8, 7, 6, 5, 4))
    assert load.touched(16) == (7, 6, 5)
