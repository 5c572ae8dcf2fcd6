"""Tensor-parallel ranks, as threads and as processes of vLLM, give what one rank gives."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kvtool.vllm.ranks import Ranks
from kvtool.vllm.worker import Comparison, Feeder
from tests.cli.working import payloads
from tests.vllm.imitation import BLOCK, OWN, Imitation, prompt_of
from tests.vllm.test_vllm import FAMILIES, MODES, WIDE, Served, alike
from tests.vllm.test_vllm import pytestmark as with_vllm
from tests.vllm.test_worker import BLOCKS, OTHERS, WAYS, feeder_of, load_of, silent

_PATIENCE = 60  # seconds, after which a rank that waits for another fails


class Threads:
    """A group of ranks that are threads, as one of them has it."""

    cpu_group = None

    def __init__(self, number: int, slots: list[Any], barrier: Barrier) -> None:
        self.rank_in_group, self.world_size, self._slots, self._barrier = number, len(slots), slots, barrier

    def _exchanged(self, own: Any) -> list[Any]:
        self._slots[self.rank_in_group] = own
        self._barrier.wait(_PATIENCE)
        given = list(self._slots)
        self._barrier.wait(_PATIENCE)
        return given

    def broadcast_tensor_dict(self, given: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(self._exchanged(given)[0])

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchanged(part), dim)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(part)).sum(0)


class Reduced(torch.nn.Module):
    """An output projection of some heads, which adds up those of all ranks."""

    def __init__(self, own: Any, some: slice, group: Threads) -> None:
        super().__init__()
        self.weight, self._group = own.parts[0].weight[:, some], group

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._group.all_reduce(seen @ self.weight.T), None


def part_of(whole: Imitation, group: Threads, copies: int = 1) -> Imitation:
    """A rank's part of a model of two ranks; `copies`: ranks that have the same KV head."""
    part = copy.deepcopy(whole)
    for layer in part.model.layers:
        own: Any = layer.self_attn
        places = []
        for name, heads, number, ranks in (
            ("num_heads", own.num_heads, group.rank_in_group, group.world_size),
            ("num_kv_heads", own.num_kv_heads, group.rank_in_group // copies, group.world_size // copies),
        ):
            setattr(own, name, heads // ranks)
            places.append(slice(number * heads // ranks, (number + 1) * heads // ranks))
        widths = [slice(one.start * own.head_dim, one.stop * own.head_dim) for one in places]
        for linear, some in zip(own.qkv_proj.parts, (widths[0], widths[1], widths[1]), strict=True):
            linear.weight = torch.nn.Parameter(linear.weight[some])
        own.qkv_proj.num_kv_head_replicas = copies
        own.o_proj = Reduced(own.o_proj, widths[0], group)
        own.attn.kv_cache = own.attn.kv_cache[:, places[1]].clone()
    return part


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Imitation:
    return Imitation(AutoModelForCausalLM.from_pretrained(tiny))


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def feeders_of(store: Path, whole: Imitation) -> list[Feeder]:
    whole.serve(OWN * 9, OTHERS)
    slots, barrier = [None, None], Barrier(2)
    feeders = []
    for number in range(2):
        group = Threads(number, slots, barrier)
        feeders.append(Feeder({"store": str(store)}, 2048, BLOCK, silent, group))
        feeders[-1].model = part_of(whole, group)
    return feeders


def caches(model: Any) -> list[torch.Tensor]:
    return [layer.self_attn.attn.kv_cache for layer in model.model.layers]


@pytest.mark.some(2)
@pytest.mark.parametrize("wish", WAYS, ids=str)
def test_two_ranks_fill_their_blocks_with_what_one_rank_does(
    store: Path, whole: Imitation, others: ThreadPoolExecutor, wish: object
) -> None:
    load = load_of(store, wish)
    feeder_of(store, whole).load(load)
    expected = [cache.clone() for cache in caches(whole)]
    first, second = feeders_of(store, whole)
    for cache in caches(first.model) + caches(second.model):
        cache[list(BLOCKS)] = torch.nan

    def fed() -> None:
        assert first.compare(Comparison(OWN * 9, OTHERS))
        first.load(load)

    following = others.submit(second.ranks.lead, lambda: None)
    first.ranks.lead(fed)
    following.result(_PATIENCE)
    for one, *parts in zip(expected, caches(first.model), caches(second.model), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), one, atol=1e-3, rtol=0, equal_nan=True)


def test_the_gate_compares_the_heads_of_every_rank(store: Path, whole: Imitation, others: ThreadPoolExecutor) -> None:
    first, second = feeders_of(store, whole)
    caches(second.model)[-1][:, :, 1] = 0.0
    following, passed = others.submit(second.ranks.lead, lambda: None), list[bool]()
    first.ranks.lead(lambda: passed.append(first.compare(Comparison(OWN * 9, OTHERS))))
    following.result(_PATIENCE)
    assert passed == [False]


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_rank_that_fails_as_all_do_goes_on_and_one_that_fails_alone_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_alone: bool
) -> None:
    class Work:
        def wait(self, timeout: Any) -> None:
            if is_alone:
                raise RuntimeError("Operation timed out!")

    def end(code: int) -> None:
        raise SystemExit(code)

    group: Any = SimpleNamespace(rank_in_group=0, world_size=2, cpu_group=None, broadcast_tensor_dict=dict)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: Work())
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit if is_alone else AttributeError):
        Ranks(object(), group).call("embed", torch.tensor([1]))
    assert ("rank 0 alone has failed: AttributeError" in capfd.readouterr().err) == is_alone


def test_ranks_that_share_a_kv_head_count_it_once(whole: Imitation, others: ThreadPoolExecutor) -> None:
    slots, barrier = [None, None], Barrier(2)
    one = copy.deepcopy(whole)
    for layer in one.model.layers:  # as if the model had one KV head
        own: Any = layer.self_attn
        own.num_kv_heads, own.attn.kv_cache = 1, own.attn.kv_cache[:, :1]
        for linear in own.qkv_proj.parts[1:]:
            linear.weight = torch.nn.Parameter(linear.weight[: own.head_dim])
    groups = [Threads(number, slots, barrier) for number in range(2)]
    first, second = (Ranks(part_of(one, group, copies=2), group) for group in groups)
    hidden, positions = torch.randn(5, whole.own.config.hidden_size), torch.arange(5)
    found = list[Any]()
    following = others.submit(second.lead, lambda: None)
    first.lead(lambda: found.extend(first.call("project", 1, hidden, positions)))
    following.result(_PATIENCE)
    assert first.kv_heads(first._model.model.layers[1].self_attn) == 1
    for side, own in zip(found, Ranks(one).call("project", 1, hidden, positions), strict=True):
        torch.testing.assert_close(side, own)


# ---- over vLLM itself ----

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
OF_TWO = {"llama": FAMILIES["llama"], "narrow": lambda: Qwen3Config(**WIDE | {"num_key_value_heads": 1})}


@pytest.fixture(scope="module", params=OF_TWO)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, request.param, OF_TWO[request.param])
        yield Served(request.param, tmp_path_factory.mktemp(request.param))


def slow(test: Any) -> Any:
    for mark in with_vllm:
        test = mark(test)
    return test


@slow
def test_vllm_answers_on_two_ranks_as_on_one(served: Served) -> None:
    ids, _ = prompt_of(served.store)
    wishes = [*MODES, {"fusion": "union", "ratio": 1.0}]
    rounds: list[list[dict[str, Any]]] = [[{"ids": prompt_of(served.store, 1)[0]}], [{"ids": ids, "kvtool": False}]]
    rounds += [[{"ids": ids, "kvtool": wish}] for wish in wishes]
    rounds += [[{"ids": ids, "kvtool": "epic"}, {"ids": ids[:-2], "kvtool": "reuse"}]]
    on_one, on_two = served.by_vllm(rounds), served.by_vllm(rounds, options=TWO)
    assert [[one.cached for one in asked] for asked in on_two] == [[one.cached for one in asked] for asked in on_one]
    assert all(asked[0].cached == len(ids) - 1 for asked in on_two[2:-1])
    for ours, theirs in zip(chain(*on_two), chain(*on_one), strict=True):
        alike(ours, theirs)
    alike(on_two[1][0], on_two[-2][0])  # recomputing everything is full prefill


@slow
def test_a_damaged_record_is_computed_on_both_ranks(served: Served) -> None:
    ids, _ = prompt_of(served.store)
    data = next((served.store / "data").glob("gen-*/data.mdb"))
    content, damaged = data.read_bytes(), load_of(served.store, "reuse").spans[1].chunk_id.hex()
    record = payloads(served.store)[damaged, 2]
    place = content.index(record)
    spoiled = {"ids": ids, "kvtool": "reuse", "spoil": [str(data), [(place, place + len(record))]]}
    _, (whole,), (got,) = served.by_vllm(
        [[{"ids": ids}], [{"ids": ids, "kvtool": "reuse"}], [spoiled | {"kvtool": "epic"}]], options=TWO
    )
    assert (whole.cached, got.cached) == (len(ids) - 1, len(ids) - 1)
    alike(served.by_kvtool(ids, ["epic"])[0], got)
