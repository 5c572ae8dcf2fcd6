"""The serde for LMCache: sizes, errors and positions of chunks, without LMCache and in its own L2."""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.fit import fit_profile
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import Profile
from kvtool.core.errors import DamagedError, KvtoolError, UsageError
from kvtool.lmcache import LevelSerde, Rope, register
from tests.codec.synthetic import LAYERS, STEP, model, relative
from tests.fusion.making import case
from tests.wording import refused

HEADS, DIM, TOKENS = 2, 24, 32
FREQUENCIES = [10000 ** (-pair / 10) for pair in range(10)]  # the last four numbers of a head are not rotated
ROPE = {"head_dim": DIM, "frequencies": FREQUENCIES, "scaling": 1.1}
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])


@dataclass
class Chunk:
    tensor: torch.Tensor

    @property
    def shapes(self) -> list[torch.Size]:
        return [self.tensor.shape]


@cache
def profile() -> Profile:
    of = model(HEADS, DIM)
    return fit_profile(lambda layer: of.sides(layer, 400), of.sensitivity, 1, {"rope": ROPE}, STEP)


def kv(start: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Make a chunk whose keys are rotated to places from `start` on."""
    of = model(HEADS, DIM)
    sides = torch.stack([of.sides(layer, TOKENS, seed=start) for layer in range(LAYERS)], 1)
    rope = Rope(DIM, torch.tensor(FREQUENCIES, dtype=torch.float64), 1.1)
    sides[0] = rope.multiplied(sides[0], rope.turns(torch.arange(start, start + TOKENS)))
    return sides.to(dtype)


def stored(serde: LevelSerde, chunk: torch.Tensor) -> torch.Tensor:
    """Serialize a chunk into a buffer that holds something else before."""
    out = torch.full((serde.estimate_serialized_size(Chunk(chunk)),), 0xAB, dtype=torch.uint8)
    assert serde.serialize(Chunk(chunk), Chunk(out), None) == len(out)
    return out


def loaded(serde: LevelSerde, data: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = torch.zeros(SHAPE, dtype=dtype)
    serde.deserialize(Chunk(data), Chunk(out), None)
    return out


def header(data: torch.Tensor) -> tuple[int, int]:
    _, _, level, _, start, _ = struct.unpack_from("<Q4sHHII", bytes(data.tolist()))
    return level, start


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_comes_back_from_as_many_bytes_as_were_stated(dtype: torch.dtype) -> None:
    serde, chunk = LevelSerde(profile(), 8), kv(64, dtype)
    made = loaded(serde, stored(serde, chunk), dtype)
    assert made.dtype == dtype
    assert torch.equal(made[:, :, 0], chunk[:, :, 0])
    assert relative(made[0], chunk[0]) < 0.09
    assert relative(made[1], chunk[1]) < 0.09


def test_the_finest_level_that_fits_is_taken() -> None:
    found = {bits: header(stored(LevelSerde(profile(), bits), kv(0)))[0] for bits in (16, 4.5, 3.4, 2.8)}
    assert sorted(found.values()) == [*found.values()]
    assert found[16] == 1 < found[2.8]
    assert {str(level) for level in found.values()} <= {*NESTED}


@pytest.mark.parametrize("start", [0, TOKENS, 40 * TOKENS, 3000 * TOKENS])
def test_positions_are_found(start: int) -> None:
    assert header(stored(LevelSerde(profile(), 8), kv(start)))[1] == start


def test_the_position_of_a_shorter_last_chunk_is_found() -> None:
    serde = LevelSerde(profile(), 8)
    stored(serde, kv(0))
    assert header(stored(serde, kv(41 * TOKENS)[:, :, : TOKENS - 9]))[1] == 41 * TOKENS


def test_a_wrong_position_costs_bytes_but_no_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    serde, chunk = LevelSerde(profile(), 16), kv(40 * TOKENS)
    right = stored(serde, chunk)
    monkeypatch.setattr(Rope, "first_position", lambda *given: 0)
    wrong = stored(serde, chunk)
    assert int(wrong.count_nonzero()) > int(right.count_nonzero())
    assert relative(loaded(serde, wrong), chunk) < 0.09


def test_nothing_of_the_buffer_is_stored() -> None:
    data = stored(LevelSerde(profile(), 16), kv(0))
    assert not data[-100:].any()


@pytest.mark.parametrize("at", [0, 4, 5, 9, 15, 20, 40, 400])
def test_a_changed_byte_is_reported(at: int) -> None:
    serde = LevelSerde(profile(), 8)
    data = stored(serde, kv(0))
    data[at] ^= 1
    with pytest.raises(DamagedError):
        loaded(serde, data)


def test_another_shape_or_profile_is_refused() -> None:
    serde = LevelSerde(profile(), 8)
    data = stored(serde, kv(0))
    with refused(DamagedError):
        loaded(LevelSerde(replace(profile(), about={"rope": ROPE, "other": 1})), data)
    with refused(KvtoolError, numbers=True):
        serde.estimate_serialized_size(Chunk(kv(0)[..., :24]))
    with pytest.raises(DamagedError):
        loaded(serde, data[:20])
    with refused(KvtoolError, numbers=True):
        serde.deserialize(Chunk(data), Chunk(torch.zeros(SHAPE[:3])), None)


def test_what_cannot_be_encoded_is_refused() -> None:
    chunk = kv(0)
    chunk[0, 0, 0, 0] = torch.inf
    for bits, given in ((8, chunk), (0.5, kv(0) * 50)):
        with refused(KvtoolError, numbers=True):
            stored(LevelSerde(profile(), bits), given)


def test_wrong_settings_are_refused() -> None:
    for bits in (0.1, 17):
        with refused(UsageError):
            LevelSerde(profile(), bits)
    with refused(KvtoolError):
        LevelSerde(replace(profile(), about={}))


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "stablelm", "qwen3"])
def test_a_models_rope_is_described(name: str) -> None:
    """Keys that another program rotated are un-rotated by the description in a codec profile."""
    decoder, places = case(name).decoder, torch.tensor([0, 1, 5, 77, 1000, 1999])
    keys = torch.randn((1, decoder.shapes[0].heads, len(places), decoder.shapes[0].key_dim))
    told = decoder.rotary.by_halves
    assert told is not None
    rope = Rope(told["head_dim"], torch.tensor(told["frequencies"], dtype=torch.float64), told["scaling"])
    rows = keys.transpose(1, 2).flatten(2)
    made = rope.multiplied(rows, rope.turns(places)).unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
    torch.testing.assert_close(made, decoder.rotary.rotate(keys, decoder.rotary.table(places), 0), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["glm", "smollm3", "deepseek-v3", "gemma3"])
def test_another_rope_has_no_description(name: str) -> None:
    """It rotates neighbours, leaves a layer out, has latents, or differs by layer."""
    assert case(name).decoder.rotary.by_halves is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what lmcache imports
def test_lmcache_stores_and_loads_chunks(tmp_path: Path) -> None:
    pytest.importorskip("lmcache", reason="needs the package lmcache")
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    with Store.create_or_open(tmp_path / "store") as store, store.writer() as writer:
        writer.put_profile(profile().digest, profile().data, {"profile": profile().digest.hex()})
    register()
    register()  # once is enough
    serde = {"type": "kvtool", "store": str(tmp_path / "store"), "bits": 6}
    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path / "l2"), "serde": serde})
    manager = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(1 << 24, use_lazy=False, shm_name="")),
            EvictionConfig("LRU"),
            parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[adapter])),
        )
    )
    try:
        keys = [ObjectKey(bytes([number]) * 8, "synthetic", 0) for number in range(3)]
        layout = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
        for at, memory in enumerate(manager.reserve_write(keys, layout).values()):
            memory.tensor.copy_(kv(at * TOKENS))
        manager.finish_write(keys)
        size = LevelSerde(profile(), 6).estimate_serialized_size(layout)
        _wait(lambda: [path.stat().st_size for path in (tmp_path / "l2").glob("*.data")] == [size] * 3)
        _wait(lambda: manager.delete_l1_keys(keys)[1] == 0)
        handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)]))
        assert manager.wait_prefetch_status(handle, 60)
        result = manager.query_prefetch_status(handle)
        assert result is not None
        assert result.l2_hit_count == 3
        with manager.read_prefetched_results(keys) as made:
            for at, memory in enumerate(made):
                assert relative(memory.tensor, kv(at * TOKENS)) < 0.2
        manager.finish_read_prefetched(keys)
    finally:
        manager.close()


def _wait(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.02)
