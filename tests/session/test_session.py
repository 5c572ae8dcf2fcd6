"""A session keeps its model through all changes of the store, and knows the measured loss of a level."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtool
from kvtool.core.api import Cache
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint import load
from kvtool.core.codec.levels import LEVELS, NO_PROFILE, Level
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.session.identity import MeasuredLosses, smallest_allowed, store_identity
from kvtool.core.session.session import Session

QUESTION = "Who built the windmill?"


@pytest.fixture
def cache(store: Path) -> Iterator[Cache]:
    with kvtool.open(store) as opened:
        opened.query(QUESTION, max_tokens=1)
        yield opened


@pytest.fixture
def loads(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that are loaded from now on."""
    loaded, load_model = [], load.load_model

    def count(files: Any, **options: Any) -> Any:
        loaded.append(files)
        return load_model(files, **options)

    monkeypatch.setattr(load, "load_model", count)
    return loaded


def test_an_ingest_takes_the_loaded_model_and_the_next_question_finds_what_is_new(
    cache: Cache, loads: list[Any], tmp_path: Path
) -> None:
    new = tmp_path / "new.md"
    new.write_text("The windmill on the hill was built by Zacharias in 1888.")
    report = cache.ingest([new])
    assert report.chunks.computed == 1
    reply = cache.query(QUESTION, max_tokens=1)
    assert {"new.md"} <= {Path(chunk.source).name for chunk in reply.chunks}
    assert all(chunk.status != "miss" for chunk in reply.chunks)
    assert loads == []


def test_compressing_and_measuring_take_it_too(cache: Cache, loads: list[Any]) -> None:
    cache.compress("cachegen-2", questions=2)
    assert {chunk.status for chunk in cache.query(QUESTION, level="cachegen-2", max_tokens=1).chunks} == {"hit"}
    assert loads == []


def test_what_makes_the_store_smaller_keeps_it(cache: Cache, loads: list[Any]) -> None:
    before = cache.query(QUESTION, max_tokens=2)
    cache.compact()
    cache.remove(Path(before.chunks[0].source))
    after = cache.query(QUESTION, max_tokens=2)
    assert before.chunks[0].source not in {chunk.source for chunk in after.chunks}
    assert loads == []


def test_a_store_made_anew_is_opened_anew(cache: Cache, loads: list[Any], corpus: Path, store: Path) -> None:
    model = store_identity(cache._session.store).model  # type: ignore[union-attr]
    shutil.rmtree(store)
    with kvtool.open(store, model=model) as other:
        other.ingest([corpus])
    cache.ingest([corpus])
    assert cache.query(QUESTION, max_tokens=1).chunks


def test_a_prompt_is_laid_out_without_the_model(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(store) as opened:
        loaded = Session.open(opened)
        expected = lay_out(loaded, Request(QUESTION), QueryOptions()).plan
        monkeypatch.setattr(load, "load_model", None)
        session = Session.open(opened)
        assert lay_out(session, Request(QUESTION), QueryOptions()).plan == expected
        assert not session.model.is_loaded


def test_closing_lets_go_of_the_model_and_the_index_at_once(store: Path) -> None:
    """Also before Python looks for circles: a service that opens store after store would hold them all."""
    gc.disable()
    try:
        with kvtool.open(store) as opened:
            opened.query(QUESTION, max_tokens=1, fusion="auto")
            assert opened._session is not None
            session = weakref.ref(opened._session)
        assert session() is None
        if Path("/proc/self/maps").exists():
            assert str(store) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


# ---- losses ----

ONE, OTHER = "11" * 16, "22" * 16


class Some:
    """A store of one chunk; its nested records name the profile `ONE`."""

    def __init__(self, **more: Any) -> None:
        rows = {ONE: {"2": 0.1, "eight": 0.3}, OTHER: {"1": 0.2, "2": 0.4}, NO_PROFILE.hex(): {"4": 0.5}}
        self.state = {
            "losses": {maker: {at: {"kl_answer": loss} for at, loss in of.items()} for maker, of in rows.items()}
        }
        self.state |= more

    def codec_state(self) -> dict[str, Any]:
        return self.state

    def made_with(self, chunk_id: bytes, level: str) -> str | None:
        return ONE if LEVELS[level].nested else None


def test_a_nested_level_by_its_profile_and_another_whatever_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, "eight", Level("eight", "eight:Eight"))
    losses = MeasuredLosses(Some())  # type: ignore[arg-type]
    assert losses.of(b"chunk", ["raw", "1", "2", "4", "eight"]) == {"2": 0.1, "eight": 0.3}
    assert losses.of(b"chunk", ["1"]) == {}


def test_where_no_level_may_be_taken_it_is_the_one_that_loses_least() -> None:
    losses = {"3": 0.03, "4": 0.2, "keep50-raw": 0.4, "keep75-raw": 0.01}
    assert smallest_allowed(["3", "4", "keep50-raw"], losses, 0.001) == "3"
    assert smallest_allowed(["3", "keep75-raw", "keep50-raw"], losses, 0.001) == "keep75-raw"
    assert smallest_allowed(["4", "keep50-raw"], {}, 0.001) == "4"  # fewer rows lose more, as far as is known
    assert smallest_allowed(["keep50-2", "keep50-raw"], {"keep50-2": 0.5}, 0.001) == "keep50-2"
    assert smallest_allowed(["keep75-2", "keep50-raw"], {}, 0.001) == "keep50-raw"
    assert smallest_allowed(["3", "keep75-raw", "lossless"], losses, 0.001) == "lossless"
    assert smallest_allowed(["keep75-raw", "raw"], losses, 0.02) == "keep75-raw"
    assert smallest_allowed(["keep75-raw", "lossless"], losses, 0.02) == "lossless"  # which is the smaller, too
