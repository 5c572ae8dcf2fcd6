"""Plans of a prune: what it removes, in which order, over made-up inventories, no store."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from kvtool.core.codec.levels import NESTED
from kvtool.core.upkeep.plan import ChunkHolding, DocumentHolding, Inventory, Plan, PruneRequest, plan_prune

MB = 10**6
SIZES = {"raw": 16 * MB, "lossless": 11 * MB, "1": 4 * MB, "2": 3 * MB, "3": 2 * MB, "4": MB}


def chunk_of(name: str) -> bytes:
    return name.encode().ljust(20, b".")


def held(
    name: str, levels: Iterable[str] = ("raw",), used: int = 0, pinned: bool = False, measured: Iterable[str] = NESTED
) -> ChunkHolding:
    stored = {level: SIZES[level] for level in levels}
    return ChunkHolding(chunk_of(name), stored, used, pinned, frozenset(measured) & stored.keys())


def inventory(*chunks: ChunkHolding, documents: Mapping[str, list[str]] | None = None, free: int = 0) -> Inventory:
    by_id = {chunk.chunk_id: chunk for chunk in chunks}
    refs = {chunk.chunk_id.rstrip(b".").decode(): [chunk.chunk_id] for chunk in chunks}
    if documents is not None:
        refs = {source: [chunk_of(name) for name in names] for source, names in documents.items()}
    last = {source: max(by_id[chunk].used for chunk in found) for source, found in refs.items()}
    order = sorted(refs, key=lambda source: (last[source], source))
    rows = tuple(
        DocumentHolding(
            source,
            last[source],
            last[source],
            any(by_id[chunk].pinned for chunk in refs[source]),
            tuple(refs[source]),
            1000,
        )
        for source in order
    )
    loose = tuple(sorted(set(by_id) - {chunk for chunks in refs.values() for chunk in chunks}))
    used = sum(sum(chunk.levels.values()) for chunk in chunks) + 1000 * len(rows) + free
    return Inventory(rows, by_id, loose, used, free)


def steps(plan: Plan) -> list[tuple[str, list[str]]]:
    return [
        (step.name, list(dict.fromkeys(chunk.rstrip(b".").decode() for chunk, _ in step.drops)) or list(step.sources))
        for step in plan.steps
    ]


def left(stock: Inventory, plan: Plan) -> dict[str, list[str]]:
    gone = {drop for step in plan.steps for drop in step.drops}
    return {
        chunk.rstrip(b".").decode(): [level for level in one.levels if (chunk, level) not in gone]
        for chunk, one in stock.chunks.items()
    }


ALL = ("raw", "lossless", *NESTED)


def test_from_exact_to_coarse_as_measured() -> None:
    stock = inventory(held("a", ALL, used=1), held("b", ALL, used=2))
    plan = plan_prune(stock, PruneRequest(goal=0))
    assert steps(plan) == [
        ("exact", ["a", "b"]),
        ("level 1", ["a", "b"]),
        ("level 2", ["a", "b"]),
        ("level 3", ["a", "b"]),
        ("kv", ["a", "b"]),
    ]
    assert plan.expected == 2000  # the text stays
    stock = inventory(held("a", ("raw", "1", "2"), measured=()), held("b", ("raw", "1", "2"), measured=("1",)))
    plan = plan_prune(stock, PruneRequest(goal=stock.used - 10 * MB))
    assert steps(plan) == [("exact", ["b"])]
    plan = plan_prune(stock, PruneRequest(goal=stock.used - 20 * MB))
    assert steps(plan) == [("exact", ["b"]), ("kv", ["a"])]


def test_no_further_than_the_goal_and_the_least_recently_used_first() -> None:
    stock = inventory(*(held(name, ("raw", "2"), used=used) for name, used in (("new", 9), ("old", 1), ("mid", 5))))
    plan = plan_prune(stock, PruneRequest(goal=stock.used - 20 * MB))
    assert steps(plan) == [("exact", ["old", "mid"])]
    assert plan.expected == stock.used - 32 * MB
    assert plan_prune(stock, PruneRequest(goal=stock.used)).steps == ()
    assert plan_prune(replace(stock, used=stock.used + 5, free=5), PruneRequest(goal=stock.used)).steps == ()


def test_order_of_removal() -> None:
    often, late = held("often", ("raw", "2"), used=5), held("late", ("raw", "2"), used=9)
    stock = inventory(replace(often, warmth=20.0), replace(late, warmth=9.0), documents={"one": ["often", "late"]})
    assert steps(plan_prune(stock, PruneRequest(goal=stock.used - 1))) == [("exact", ["late"])]
    stock = inventory(*(held(name, ("raw", "2", "4"), used=used) for name, used in (("new", 9), ("old", 1))))
    assert steps(plan_prune(stock, PruneRequest(goal=stock.used - 1, fetched=True))) == [("kv", ["old"])]
    stock = inventory(held("a", ("raw", "lossless")))
    assert left(stock, plan_prune(stock, PruneRequest(goal=stock.used - 1))) == {"a": ["lossless"]}
    stock = inventory(held("a"), held("loose"), documents={"a": ["a"]})
    plan = plan_prune(stock, PruneRequest(goal=stock.used - 1))
    assert [(step.name, step.loose) for step in plan.steps] == [("unreferenced", [chunk_of("loose")])]


def test_the_profile_goes_once_nothing_is_left_that_needs_it() -> None:
    def profiles(stock: Inventory, goal: int, fetched: bool = False) -> list[bytes]:
        return [one for step in plan_prune(stock, PruneRequest(goal, fetched=fetched)).steps for one in step.profiles]

    beginning = chunk_of("begin")
    stock = inventory(held("a", ("raw", "2")), held("b", ("4",)))
    chunks = {**stock.chunks, beginning: ChunkHolding(beginning, {"raw": MB})}
    stock = replace(stock, chunks=chunks, beginning=beginning, used=stock.used + 6 * MB, profile=(b"profile", 5 * MB))
    assert profiles(stock, 2 * MB) == [b"profile"]
    assert plan_prune(stock, PruneRequest(goal=2 * MB)).expected == MB + 2000
    assert profiles(stock, 7 * MB) == []  # small enough with it
    assert profiles(stock, 2 * MB, fetched=True) == []
    assert profiles(replace(stock, beginning=b""), 2 * MB) == []  # any other record would be compressed with it
    coded = {**chunks, beginning: ChunkHolding(beginning, {"4": MB})}
    assert profiles(replace(stock, chunks=coded), 2 * MB) == []


def test_pins_are_never_touched() -> None:
    stock = inventory(held("a", ALL, used=1, pinned=True), held("b", ALL, used=2))
    for wanted in (
        PruneRequest(goal=0),
        PruneRequest(goal=0, unused_before=9),
        PruneRequest(cold_before=9, unused_before=9),
    ):
        plan = plan_prune(stock, wanted)
        assert left(stock, plan)["a"] == list(ALL)
        assert "a" not in plan.sources


def test_cold_chunks_are_kept_coarse_and_hot_ones_fine() -> None:
    stock = inventory(
        held("cold", ALL, used=1),
        held("hot", ALL, used=9),
        held("coarse", ("raw", "1", "2", "4"), used=1, measured=("1", "2")),
        held("unmeasured", ("raw", "3"), used=1, measured=()),
    )
    plan = plan_prune(stock, PruneRequest(cold_before=5))
    assert left(stock, plan) == {
        "cold": ["4"],
        "hot": list(ALL),
        "coarse": ["2", "4"],  # 4 may be what 2 refines
        "unmeasured": ["raw", "3"],
    }


def test_documents_and_shared_chunks() -> None:
    stock = inventory(held("a", used=1), held("b", used=6))
    assert plan_prune(stock, PruneRequest(unused_before=5)).sources == ("a",)
    assert plan_prune(stock, PruneRequest(added_before=9)).sources == ("a", "b")
    last = plan_prune(stock, PruneRequest(goal=0, unused_before=5, as_needed=True))
    assert steps(last) == [("kv", ["a", "b"]), ("documents", ["a"])]
    assert plan_prune(stock, PruneRequest(goal=stock.used, unused_before=5, as_needed=True)).steps == ()
    stock = inventory(
        held("own", used=1), held("shared", used=8), held("other", used=9),
        documents={"old": ["own", "shared"], "new": ["shared", "other"]},
    )  # fmt: skip
    plan = plan_prune(stock, PruneRequest(goal=stock.used - 1))
    assert left(stock, plan) == {"own": [], "shared": ["raw"], "other": ["raw"]}
    (step,) = plan_prune(stock, PruneRequest(unused_before=9)).steps
    assert (step.sources, step.chunks, step.size) == (["old"], 1, SIZES["raw"] + 1000)
    assert plan_prune(stock, PruneRequest(unused_before=10)).steps[0].chunks == 3


@pytest.mark.parametrize("seed", range(40))
def test_laws_of_any_plan(seed: int) -> None:
    dice = random.Random(seed)
    chunks = [
        held(
            f"c{number}",
            [level for level in ALL if dice.random() < 0.6],
            dice.randrange(9),
            dice.random() < 0.2,
            [level for level in NESTED if dice.random() < 0.6],
        )
        for number in range(12)
    ]
    documents = {f"d{number}": [f"c{dice.randrange(12)}" for _ in range(3)] for number in range(6)}
    stock = inventory(*chunks, documents=documents)
    cold = dice.choice([None, 4])
    goal = dice.choice([None, dice.randrange(stock.used)])
    plan = plan_prune(stock, PruneRequest(goal=goal, cold_before=cold))
    stays = left(stock, plan)
    for chunk in chunks:
        name = chunk.chunk_id.rstrip(b".").decode()
        if chunk.pinned and chunk.chunk_id not in stock.loose:
            assert stays[name] == list(chunk.levels)
        kept = [level for level in stays[name] if level in NESTED]
        if kept:  # a refinement's base is coarser: whatever stays, all that is coarser stays, too
            coarser = [level for level in chunk.levels if level in NESTED and level > kept[0]]
            assert set(coarser) <= set(kept)
        if stays[name] != list(chunk.levels) and stays[name] and "raw" not in stays[name]:
            assert "lossless" in stays[name] or set(stays[name]) & chunk.measured
    drops = [drop for step in plan.steps for drop in step.drops]
    assert len(drops) == len(set(drops))
    assert plan.expected == stock.used - sum(stock.chunks[chunk].levels[level] for chunk, level in drops)
    if goal is not None and plan.expected > goal:
        assert all(not stays[c.chunk_id.rstrip(b".").decode()] for c in chunks if not c.pinned)
