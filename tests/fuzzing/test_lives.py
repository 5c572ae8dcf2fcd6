"""Short lives, so that the fuzzers stay alive: and both notice what is broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvtool.core.query.conversation import TurnLayout
from kvtool.core.session.identity import StoreIdentity
from tests.fuzzing import runs
from tests.fuzzing.engines import EngineLife
from tests.fuzzing.lives import StoreLife
from tests.fuzzing.runs import Begin, Lived, Step, live
from tests.laws import mutants

_OF_STORE = "ask edit lead_in compress flip stale pack kill chat tier"
_OF_ENGINE = "edit lead_in remade"


@pytest.fixture(scope="module", autouse=True)
def folders() -> Iterator[None]:
    yield
    runs.clean()


def lived(begin: Begin, family: str, names: str, seed: int = 1) -> Lived:
    steps: Sequence[Step] = [Step(number, name) for number, name in enumerate(names.split())]
    return live(begin, family, seed, steps)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "deepseek-v2", "lfm2"])
def test_a_life_of_a_store(family: str, one_thread: None) -> None:
    found = lived(StoreLife, family, _OF_STORE)
    assert found.at is None, found.trace
    assert found.checks["store"] >= 10
    assert found.checks["full"]


@pytest.mark.slow
def test_a_life_of_an_engine(one_thread: None) -> None:
    found = lived(EngineLife, "llama", _OF_ENGINE)
    assert found.at is None, found.trace
    assert found.checks["conversation"] >= 6


def test_keys_one_position_too_far_are_noticed(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    mutants.positions_off_by_one(monkeypatch)
    assert lived(StoreLife, "llama", "ask ask").at is not None


def test_a_lead_in_left_out_of_the_name_is_noticed(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    def named(self: StoreIdentity, ids: Sequence[int], lead_in: bytes) -> bytes:
        return real(self, ids, b"")

    real = StoreIdentity._id
    monkeypatch.setattr(StoreIdentity, "_id", named)
    assert lived(StoreLife, "llama", "ask lead_in ask").at is not None


def test_a_stale_conversation_is_noticed(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    for name in ("finds_the_same", "has_all_records"):
        monkeypatch.setattr(TurnLayout, name, lambda *_: True)
    assert lived(EngineLife, "llama", "turn lead_in turn lead_in turn").at is not None
