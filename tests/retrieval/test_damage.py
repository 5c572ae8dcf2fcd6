"""Flipped and cut bytes of the index, the vectors and the other files: found, reported, made anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from kvtool.core.cache.integrity import find_damage
from kvtool.core.cache.store import Store
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import RetrievalOptions
from tests.cli.working import kvtool
from tests.retrieval.making import retrieval

TEXTS = {
    "a": "The mill\n\nA grinder of bread.\n\nThe loaf.",
    "b": "The river\n\nA stream, and a mill.",
    "c": "Bread\n\nA loaf of bread from the mill at the river.",
}
QUESTIONS = ("mill river", "bread", "loaf stream")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path, bit: int) -> None:
    path.write_bytes(path.read_bytes()[: bit // 8])


WORDS = retrieval("bm25", top_k=3)


def found(store: Store, options: RetrievalOptions = WORDS) -> tuple[list[object], list[str]]:
    told: list[str] = []
    finder = Finder(store, lambda text, hint: told.append(text))
    return [finder.find(question, options).hits for question in QUESTIONS], told


@pytest.mark.parametrize("kind", ["state", "segment", "vectors"])
@pytest.mark.parametrize(("spoil", "times"), [(flip, 25), (cut, 5)])
def test_flipped_bits_are_found(
    store: Store, static_model: Path, kind: str, spoil: Callable[[Path, int], None], times: int
) -> None:
    how = retrieval("hybrid", static_model, top_k=3)
    wanted, told = found(store, how)
    assert told == []
    some = random.Random(f"{kind} {times}")
    for number in range(times):
        (path,) = (store.path / "index").rglob(f"{kind}*")
        spoil(path, some.randrange(8 * path.stat().st_size) if number else 0)
        (damage,) = find_damage(store, Fraction(1))
        assert damage.kind == "side file"
        assert path.name in damage.reason
        rankings, told = found(store, how)
        assert rankings == wanted
        assert len(told) == 1
        assert "made anew" in told[0]
        assert list(find_damage(store, Fraction(1))) == []
    assert found(store, how) == (wanted, [])


def test_verify_tells_of_a_damaged_index(store: Store) -> None:
    wanted = found(store)
    (path,) = (store.path / "index").rglob("state*")
    flip(path, 99)
    done = kvtool("store", "verify", "--store", store.path, "--json").fine(13)
    (row,) = done.json["damaged"]
    assert row["kind"] == "side file"
    assert row["reason"] == f"{path.relative_to(store.path)} does not match its digest"
    assert kvtool("store", "verify", "--store", store.path, "--repair", "--json").fine().json["repaired"] == 1
    assert not path.exists()
    kvtool("store", "verify", "--store", store.path).fine()
    assert found(store) == wanted


@pytest.mark.parametrize("spoil", [flip, cut])
def test_damaged_name_of_the_embedder(store: Store, static_model: Path, spoil: Callable[[Path, int], None]) -> None:
    """Questions would silently be answered by words only."""
    Finder(store).embed(str(static_model))
    (path,) = (store.path / "index").glob("embedder*")
    spoil(path, 8 * 20)
    _, told = found(store, retrieval(top_k=3))
    assert any("the name of the embedding model is damaged" in text for text in told)
