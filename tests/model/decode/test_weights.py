"""Steps read weights in the form of fewest bytes: packed, in the checkpoint's file, or as the model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.onednn import can_pack
from kvtool.core.kernels.linear.qtensor import LAYOUTS
from kvtool.core.model.decode import TorchBackend, decode_backend
from kvtool.core.model.decode.native import CompiledModel, compiled_model
from kvtool.core.model.decoder import Decoder
from tests.families import save_tiny
from tests.fusion.making import decoder_of, tokens
from tests.kernels.linear.matrices import random_matrix


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
