"""Steps of several sequences at once: each gets what its own steps give, bit by bit: logits, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.model.decode import DecodeBackend, decode_backend, step_along, step_together
from kvtool.core.model.decode import native as native_steps
from kvtool.core.model.decode.native import NativeBackend
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.native.isa import ISAS, Isa, best_isa, multiplies_int8, runnable
from tests.checkpoint.gguf_files import written
from tests.checkpoint.gguf_models import IN_GGUF
from tests.families import NATIVE
from tests.fusion.making import case, new_case, tokens
from tests.model.decode.test_native import trusted

LENGTHS = (140, 1, 127, 300, 36)


def caches(decoder: Decoder, count: int) -> list[PromptCache]:
    """Prefill prompts of different lengths; the second's cache has no space for more."""
    lengths = [LENGTHS[number % len(LENGTHS)] + number // len(LENGTHS) for number in range(count)]
    return [decoder.prefill(tokens(length, 7), reserve=9 * (at != 1))[1] for at, length in enumerate(lengths)]


def backends(decoder: Decoder, count: int, isa: Isa | None = None) -> list[NativeBackend]:
    compiled = trusted(decoder, isa or ISAS[runnable()[0]])
    return [NativeBackend(decoder, compiled, cache) for cache in caches(decoder, count)]


def given(step: int, count: int) -> list[int]:
    return list(tokens(count, 100 + step))


def same(one: Sequence[NativeBackend], other: Sequence[NativeBackend]) -> bool:
    sides = [[side for each in lot for layer in each._cache.buffers for side in layer.view()] for lot in (one, other)]
    return all(torch.equal(*pair) for pair in zip(*sides, strict=True))


def check(decoder: Decoder, counts: Sequence[int], isa: Isa | None = None) -> None:
    """Check steps of so many of the sequences, first ones first, against steps of each one."""
    alone, together = (backends(decoder, max(counts), isa) for _ in range(2))
    for step, count in enumerate(counts):
        ids = given(step, count)
        expected = [one.step(token) for one, token in zip(alone[:count], ids, strict=True)]
        found = step_together(together[:count], ids)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), count
    assert same(alone, together)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_every_family(name: str, dtype: str) -> None:
    check(case(name, dtype).decoder, (5, 2, 5))


@pytest.mark.parametrize("isa", [ISAS[name] for name in runnable()], ids=str)
@pytest.mark.parametrize("name", ["llama", "olmo2", "gemma3"])
def test_every_instruction_set_and_number(name: str, isa: Isa) -> None:
    check(case(name).decoder, (1, 2, 3, 4, 6, 7), isa)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_one_cache_takes_several_tokens(name: str, dtype: str) -> None:
    """Each sees those before it in the same step; the cache grows on the way."""
    alone, along = (backends(case(name, dtype).decoder, 1)[0] for _ in range(2))
    expected, ids = alone._cache.buffers[0].length + 19, given(0, 19)
    for one, found in zip(ids, step_along(along, ids), strict=True):
        assert torch.equal(alone.step(one), found)
    assert along._cache.buffers[0].length == expected
    assert same([alone], [along])


@pytest.mark.skipif(multiplies_int8(best_isa()) is None, reason="the CPU has no AVX2")
@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_inputs_in_8_bit_integers(name: str, tmp_path: Path) -> None:
    """Each is rounded for itself; the model's own forward multiplies its rows in the same way."""
    written(tmp_path / "x.gguf", IN_GGUF[name])
    decoder = Decoder(load_model(resolve(str(tmp_path / "x.gguf")), device="cpu", dtype="int8", packed=True))
    steps = backends(decoder, 1)[0]
    assert set(steps.compiled.kinds) & {"q4_k_int8", "q6_k_int8"}
    steps.compiled.self_check_error = None
    steps.step(5)
    assert steps.name == "native", steps.why
    check(decoder, (1, 3, 5))


def test_more_than_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_steps, "MOST_TOGETHER", 4)
    check(case("qwen3").decoder, (9, 10))


@pytest.mark.parametrize("count", [2, 3])
def test_the_number_of_threads_changes_no_bit(count: int, threads: None) -> None:
    decoder, ids, logits, lots = case("qwen3").decoder, given(0, 6), [], []
    for number in (1, count):
        torch.set_num_threads(number)
        lots += [backends(decoder, 6), backends(decoder, 6)]
        logits += [step_together(lots[-2], ids), [one.step(token) for one, token in zip(lots[-1], ids, strict=True)]]
    assert all(torch.equal(*pair) for other in logits[1:] for pair in zip(logits[0], other, strict=True))
    assert all(same(lots[0], other) for other in lots[1:])


def test_positions_that_are_not_places() -> None:
    """A prompt of which rows were left out continues after its last position."""
    decoder = case("llama").decoder
    lots = [backends(decoder, 3) for _ in range(2)]
    for lot in lots:
        lot[2]._cache.position_ids = [*range(120), *range(200, 207)]
    alone = [one.step(token) for one, token in zip(lots[0], (5, 6, 7), strict=True)]
    assert all(torch.equal(*pair) for pair in zip(alone, step_together(lots[1], (5, 6, 7)), strict=True))
    assert lots[1][2]._cache.position_ids == [*range(120), *range(200, 208)]


def test_those_without_machine_code_go_beside_the_others() -> None:
    """And all go one by one until the model's first step is trusted."""
    decoder = new_case("mistral-window").decoder

    def lot() -> list[DecodeBackend]:
        held = caches(decoder, 3)
        held[0].position_ids = [*range(139), 150]  # a window over rows that are not at their places
        return [decode_backend(decoder, cache) for cache in held]

    together, alone = lot(), lot()
    assert [one.name for one in together] == ["torch", "native", "native"]
    for step in range(3):
        found = step_together(together, given(step, 3))
        expected = [one.step(token) for one, token in zip(alone, given(step, 3), strict=True)]
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_two_models_do_not_mix() -> None:
    decoders = [case("llama").decoder, case("qwen3").decoder]
    lots = [[backends(decoder, 2) for decoder in decoders] for _ in range(2)]
    together, alone = ([one for pair in zip(*lot, strict=True) for one in pair] for lot in lots)
    found = step_together(together, given(0, 4))
    expected = [one.step(token) for one, token in zip(alone, given(0, 4), strict=True)]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_logits_stay_the_callers() -> None:
    lot = backends(case("llama").decoder, 3)
    first = step_together(lot, given(0, 3))
    kept = [row.clone() for row in first]
    step_together(lot, given(1, 3))
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))


def test_a_token_that_there_is_not_is_refused_for_all() -> None:
    lot = backends(case("llama").decoder, 2)
    with pytest.raises(IndexError):
        step_together(lot, [4, 100_000])
    assert [one._cache.buffers[0].length for one in lot] == [140, 1]
