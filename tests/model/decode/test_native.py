"""A step in machine code gives what the model's own forward gives, for every family that has a program."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.model.decode import DecodeBackend, TorchBackend, decode_backend
from kvtool.core.model.decode.native import CompiledModel, NativeBackend, compiled_model
from kvtool.core.model.decode.program import decoding_weights
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.spec import UnsupportedArchitecture
from kvtool.core.native.isa import ISAS, Isa, runnable
from tests.families import NATIVE, tiny_model
from tests.fusion.making import case, decoder_of, new_case, rms, tokens

# Logits have a standard deviation of about 3. Measured difference: 2e-5 at most, and in bfloat16, where the model's
# own forward rounds after every operation, .24.
NEAR = {"float32": 1e-4, "bfloat16": 0.5}


def steps(backend: DecodeBackend, ids: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([backend.step(token) for token in ids])


def trusted(decoder: Decoder, isa: Isa) -> CompiledModel:
    compiled = CompiledModel(decoder, isa)
    compiled.self_check_error = ""
    return compiled


def both(decoder: Decoder, isa: Isa, prompt: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, more = tokens(prompt, 3), tokens(count, 9)
    own, other = decoder.prefill(ids)[1], decoder.prefill(ids)[1]
    native = NativeBackend(decoder, trusted(decoder, isa), other)
    return steps(TorchBackend(decoder, own), more), steps(native, more)


@pytest.mark.parametrize("isa", [ISAS[name] for name in runnable()], ids=str)
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", NATIVE)
def test_every_family_on_every_instruction_set(name: str, dtype: str, isa: Isa) -> None:
    expected, found = both(case(name, dtype).decoder, isa, 140, 12)
    assert (expected - found).abs().max() <= NEAR[dtype]


@pytest.mark.parametrize("prompt", [1, 2, 126, 127, 128, 250])
def test_at_the_edges_of_a_block_of_keys(prompt: int) -> None:
    expected, found = both(case("llama").decoder, ISAS[runnable()[0]], prompt, 5)
    assert (expected - found).abs().max() <= NEAR["float32"]


@pytest.mark.slow
def test_a_hundred_tokens_stay_near() -> None:
    """What is written into the cache is what the model would have written."""
    decoder = case("qwen3").decoder
    expected, found = both(decoder, ISAS[runnable()[0]], 40, 100)
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).max() < 1e-9


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(count: int, threads: None) -> None:
    decoder, isa, more, logits = case("qwen3").decoder, ISAS[runnable()[0]], tokens(6, 9), []
    torch.set_num_threads(1)
    caches = [decoder.prefill(tokens(300, 3))[1] for _ in range(2)]
    for cache, threads_ in zip(caches, (1, count), strict=True):
        torch.set_num_threads(threads_)
        logits.append(steps(NativeBackend(decoder, trusted(decoder, isa), cache), more))
    assert torch.equal(*logits)
    for one, other in zip(caches[0].buffers, caches[1].buffers, strict=True):
        assert all(map(torch.equal, one.view(), other.view()))


def test_two_caches_take_turns() -> None:
    decoder = case("llama").decoder
    prompts = [tokens(30, 1), tokens(170, 2)]
    own = [TorchBackend(decoder, decoder.prefill(ids)[1]) for ids in prompts]
    native = [decode_backend(decoder, decoder.prefill(ids)[1]) for ids in prompts]
    kept = []
    for token in tokens(4, 5):
        for one, other in zip(own, native, strict=True):
            expected, found = one.step(token), other.step(token)
            assert (expected - found).abs().max() <= NEAR["float32"]
            kept.append((found, found.clone()))
    assert all(torch.equal(*pair) for pair in kept), "logits of one cache were written over by the other's"


def test_a_cache_without_room_grows() -> None:
    decoder, ids = case("llama").decoder, tokens(20, 1)
    cache = decoder.prefill(ids, reserve=0)[1]
    backend, own = decode_backend(decoder, cache), TorchBackend(decoder, decoder.prefill(ids)[1])
    places = set()
    for token in tokens(40, 5):
        assert (backend.step(token) - own.step(token)).abs().max() <= NEAR["float32"]
        places.add(cache.buffers[0].keys.data_ptr())
    assert len(places) > 1
    assert [buffer.length for buffer in cache.buffers] == [60] * len(cache.buffers)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mixtral", "has experts"),
        ("qwen3-moe", "has experts"),
        ("gpt-oss", "sinks"),
        ("glm", "not rotated in halves"),
        ("stablelm", "has dropout"),
    ],
)
def test_what_is_not_known_is_left_to_the_model(name: str, why: str) -> None:
    decoder = case(name).decoder
    with pytest.raises(UnsupportedArchitecture, match=why):
        decoding_weights(decoder)
    backend = decode_backend(decoder, decoder.prefill(tokens(5, 1))[1])
    assert backend.name == "torch"
    assert why in backend.why


def test_a_module_nobody_knows_is_left_to_the_model() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.add_module("adapter", torch.nn.Linear(64, 64))
    decoder = decoder_of(model)
    assert "has adapter" in decode_backend(decoder, decoder.new_cache(4)).why


def test_a_first_step_that_comes_out_otherwise_is_not_trusted() -> None:
    """A family whose modules look like Llama's and whose forward does something else."""
    own = new_case("llama")
    decoder, ids = own.decoder, tokens(9, 1)
    vars(decoder)["passes"] = HfForward(decoder, "a test")
    forward = decoder.layers[1].mlp.forward
    decoder.layers[1].mlp.forward = lambda x: 1.5 * forward(x)
    backend, plain = (make(decoder, decoder.prefill(ids)[1]) for make in (decode_backend, TorchBackend))
    assert backend.name == "native"
    for token in tokens(3, 2):
        assert torch.equal(backend.step(token), plain.step(token))
    assert backend.name == "torch"
    assert "otherwise" in backend.why
    assert decode_backend(decoder, decoder.prefill(ids)[1]).name == "torch"


@pytest.mark.slow
def test_an_engine_does_not_keep_its_model() -> None:
    import gc
    import weakref

    decoder = new_case("llama").decoder
    compiled_model(decoder)
    gone = weakref.ref(decoder)
    del decoder
    gc.collect()
    assert gone() is None


def test_a_token_that_there_is_not_is_refused() -> None:
    decoder = case("llama").decoder
    backend = decode_backend(decoder, decoder.prefill(tokens(5, 1))[1])
    backend.step(4)
    with pytest.raises(IndexError):
        backend.step(100_000)


def test_bfloat16_is_nearer_to_the_exact_numbers_than_the_models_own() -> None:
    """Nothing is rounded between the operations of a step."""
    decoder = case("qwen2", "bfloat16").decoder
    expected, found = both(decoder, ISAS[runnable()[0]], 60, 20)
    assert rms(expected - found) < 0.1
