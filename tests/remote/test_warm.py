"""`kvtool store warm`: what a journal asks for comes into the store in front, the warmest first, within its budget."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.cache.warmth import HALF_LIFE
from kvtool.core.errors import RemoteError
from kvtool.core.remote.opening import local_place, open_shared
from kvtool.core.remote.warm import WarmReport, warm
from kvtool.core.upkeep.budget import keep_budget
from tests.cache.making import id_of
from tests.cli.working import QUESTION, SHORT, kvtool
from tests.remote.serving import wreck
from tests.remote.test_front import FILES, ask, here
from tests.remote.test_front import url as tier

__all__ = ["tier"]
NOW = time.time()


def asked(*often: int) -> dict[bytes, float]:
    """Files' chunks by how often each was asked for, in powers of two."""
    return {id_of(f"f{number}.0"): NOW + times * HALF_LIFE for number, times in enumerate(often)}


def warmed(url: str, wanted: dict[bytes, float], **options: Any) -> WarmReport:
    with open_shared(url) as store:
        return warm(store, wanted, level="auto", max_loss=0.01, **options)


def test_the_warmest_come_as_far_as_the_budget_goes(tier: str) -> None:
    open_shared(tier).close()
    budget = space.folder_bytes(local_place(tier)) + 6 * 10**6
    keep_budget(local_place(tier), budget)
    wanted = asked(1, 6, 2, 5, 3, 4, 0, 0)
    tried = warmed(tier, wanted, dry_run=True)
    assert here(tier) == []
    done = warmed(tier, wanted)
    kept = here(tier)
    assert 2 <= len(kept) < 6
    assert kept == sorted([1, 3, 5, 4, 2][: len(kept)])
    assert space.folder_bytes(local_place(tier)) <= budget
    assert (done.fetched, done.left, done.asked, done.absent) == (len(kept), 8 - len(kept), 8, 0)
    assert (tried.fetched, tried.bytes, tried.hits_after) == (done.fetched, done.bytes, done.hits_after)
    assert done.hits_before == 0
    assert 0.5 < done.hits_after < 1
    again = warmed(tier, wanted)
    assert (again.fetched, again.bytes, again.hits_before) == (0, 0, done.hits_after)
    assert here(tier) == kept
    warmed(tier, {id_of("f9.0"): NOW + HALF_LIFE})
    assert here(tier) == kept  # what is asked more often stays
    warmed(tier, {id_of("f9.0"): NOW + 9 * HALF_LIFE})
    assert {1, 9} <= {*here(tier)}


def test_what_was_broken_off_goes_on_and_what_is_damaged_is_told(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.remote.warm.BATCH_BYTES", 1)

    class Stopped(Exception):
        pass

    class Twice:
        left = 2

        def step(self, label: str, total: int, unit: str) -> None:
            pass

        def advance(self, count: float) -> None:
            self.left -= 1
            if not self.left:
                raise Stopped

    wreck(tier, id_of("f3.0").hex(), "raw", 1)
    with pytest.raises(Stopped):
        warmed(tier, asked(*range(FILES, 0, -1)), events=Twice())
    assert here(tier) == [0, 1]
    done = warmed(tier, asked(*range(FILES, 0, -1)))
    assert (done.fetched, done.left) == (FILES - 3, 0)
    assert [row["chunk"] for row in done.damaged] == [id_of("f3.0").hex()]
    assert here(tier) == [number for number in range(FILES) if number != 3]
    told: list[str] = []
    for number in range(3):
        ask(tier, number, told)
    assert told == []
    (Path(tier.removeprefix("file://")) / "head").write_bytes(b"no head")
    with pytest.raises(RemoteError):
        warmed(tier, asked(1))


def test_every_kind_of_journal(store: Path, url: str, tmp_path: Path) -> None:
    kvtool("store", "push", url, "--store", store).fine()
    found = kvtool("query", QUESTION, "--store", store, "--json", *SHORT).fine().json
    chunks = [chunk["id"] for chunk in found["chunks"]]
    journal = tmp_path / "journal.jsonl"
    lines = [
        {"question": QUESTION},
        found,
        {"type": "request", "time": NOW - HALF_LIFE, "chunks": chunks[:1]},
        {"type": "request", "time": 10**400, "chunks": chunks[:1]},  # later than now, and than any number of a float
        {"question": "zzzz"},
    ]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn', encoding="utf-8")
    options = ("--store", url, "--json")
    tried = kvtool("store", "warm", *options, "--from", journal, "--dry-run").fine().json
    done = kvtool("store", "warm", *options, "--from", journal).fine().json
    assert (done["lines"], done["passed_over"], done["asked"]) == (4, 2, len(chunks))
    assert tried["bytes"] == done["bytes"] > 0
    assert (done["hits_before"], done["hits_after"], done["damaged"]) == (0, 1, [])
    with Store.open(local_place(url)) as front:
        assert all(front.levels(bytes.fromhex(chunk)) for chunk in chunks)
    assert kvtool("store", "warm", *options).fine().json["fetched"] == 0  # by what was asked here
    assert kvtool("store", "warm", *options, "--from", store).fine().json["fetched"] == 0
    journal.write_text('{"question": "zzzz"}\n', encoding="utf-8")
    assert kvtool("store", "warm", *options, "--from", journal).code == 2
    assert kvtool("store", "warm", *options, "--from", tmp_path / "none").code == 2
    assert kvtool("store", "warm", "--store", store).code == 2
