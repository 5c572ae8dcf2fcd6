"""A step in machine code gives what the model's own forward gives, for every family that has a program; it reads
weights in the form of fewest bytes: packed, in the checkpoint's file, or as the model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.kernels.linear.modules import PackedLinear, can_pack
from kvtool.core.kernels.linear.qtensor import LAYOUTS
from kvtool.core.model.decode import DecodeBackend, TorchBackend, decode_backend
from kvtool.core.model.decode.native import CompiledModel, NativeBackend, compiled_model
from kvtool.core.model.decode.program import decoding_weights
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.spec import UnsupportedArchitecture
from kvtool.core.native.isa import ISAS, Isa, runnable
from tests.families import NATIVE, save_tiny
from tests.fusion.making import case, decoder_of, new_case, tokens
from tests.kernels.linear.matrices import random_matrix
from tests.wording import refused

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


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "glm", "stablelm"])
def test_what_is_not_known_is_left_to_the_model(name: str) -> None:
    decoder = case(name).decoder
    with refused(UnsupportedArchitecture) as caught:
        decoding_weights(decoder)
    backend = decode_backend(decoder, decoder.prefill(tokens(5, 1))[1])
    assert backend.name == "torch"
    assert str(caught.value) in backend.why


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


def opened(folder: Path, dtype: str, packed: bool = False) -> Decoder:
    return Decoder(load_model(resolve(str(folder)), device="cpu", dtype=dtype, packed=packed))


def kinds(decoder: Decoder) -> tuple[str, ...]:
    compiled = compiled_model(decoder)
    assert isinstance(compiled, CompiledModel), compiled
    return compiled.kinds


def apart(decoder: Decoder) -> float:
    """The largest difference of some steps to the model's own."""
    ids = tokens(50, 1)
    own, other = TorchBackend(decoder, decoder.prefill(ids)[1]), decode_backend(decoder, decoder.prefill(ids)[1])
    differences = [float((own.step(token) - other.step(token)).abs().max()) for token in tokens(5, 2)]
    assert other.name == "native", other.why
    return max(differences)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_in_float32_read_a_checkpoint_in_its_own_format(dtype: str, tmp_path: Path) -> None:
    decoder = opened(save_tiny("qwen2", tmp_path / "m", dtype=dtype), "float32")
    assert kinds(decoder) == (dtype,)
    assert apart(decoder) < 1e-4


@pytest.mark.slow
def test_weights_that_are_not_the_files_are_not_taken_from_it(tmp_path: Path) -> None:
    decoder = opened(save_tiny("qwen2", tmp_path / "m", dtype="bfloat16"), "float32")
    with torch.no_grad():
        decoder.layers[1].get_submodule("mlp.down_proj").weight.mul_(1.5)  # type: ignore[operator, union-attr]
    assert kinds(decoder) == ("bfloat16", "float32")
    assert apart(decoder) < 1e-4


def test_what_onednn_has_packed_is_read_from_the_file(tmp_path: Path) -> None:
    if not can_pack(torch.zeros(16, 16, dtype=torch.bfloat16)):
        pytest.skip("oneDNN packs nothing here")
    decoder = opened(save_tiny("llama", tmp_path / "m", dtype="bfloat16"), "bfloat16", packed=True)
    assert decoder.layers[0].get_submodule("mlp.down_proj").weight.device.type == "meta"
    assert kinds(decoder) == ("bfloat16",)
    assert apart(decoder) < 0.5


def wide_model() -> Any:
    """A llama whose MLP is 256 wide: the K kinds come in blocks of so many columns."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads)).eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name, layout in LAYOUTS.items() if not layout.dense])
def test_packed_weights_are_multiplied_as_they_are(kind: str) -> None:
    """The MLP's way down has rows long enough for every kind."""
    decoder = decoder_of(wide_model())
    for number, layer in enumerate(decoder.base.layers):
        rows, columns = layer.mlp.down_proj.weight.shape
        layer.mlp.down_proj = PackedLinear(random_matrix(kind, rows, columns, number), None, torch.float32)
    assert kinds(decoder) == tuple(sorted(("float32", kind)))
    assert apart(decoder) < 2e-3
