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
from tests.families import NATIVE
from tests.fusion.making import case, new_case, tokens

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


def test_a_first_step_that_comes_out_otherwise_is_not_trusted() -> None:
    """A family whose modules look like Llama's and whose forward does something else."""
    own = new_case("llama")
    decoder, ids = own.decoder, tokens(9, 1)
    vars(decoder)["forward"] = HfForward(decoder, "a test")
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
