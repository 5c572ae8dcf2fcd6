"""Packed layers: many rows give what bfloat16 weights give, bit for bit; one row what the file's do.

Weights of a GGUF file are in memory packed as in the file, each under its name.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvtool.core.checkpoint.gguf.header import read_header
from kvtool.core.checkpoint.hub import model_fingerprint, resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear import modules
from kvtool.core.kernels.linear.modules import PackedEmbedding, PackedLinear
from kvtool.core.kernels.linear.qtensor import LAYOUTS, READERS
from kvtool.core.kernels.linear.quantized import dequantize_rows, gemv
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from tests import families
from tests.checkpoint.gguf_files import write_gguf
from tests.families import save_tiny, tiny_model
from tests.kernels.linear.matrices import dequantize, random_matrix
from tests.wording import refused

KINDS = [kind for kind, layout in LAYOUTS.items() if not layout.dense]
IDS = list(range(5, 60))
ORDER = {"float32": 1e-5, "bfloat16": 1e-2}  # what another order of sums may move


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_linear_layer(kind: str, dtype: torch.dtype) -> None:
    matrix, bias = random_matrix(kind, 40, 512), torch.randn(40).to(dtype)
    layer = PackedLinear(matrix, bias, dtype)
    many = torch.randn(2, 3, 512).to(dtype)
    rounded = dequantize(matrix).bfloat16().to(dtype)
    assert torch.equal(layer(many), F.linear(many, rounded, bias))
    one = many[:1, :1]
    exact = F.linear(one.double(), dequantize(matrix).double(), bias.double())
    assert torch.equal(layer(torch.stack([one, -one], -1)[..., 0]), layer(one))  # not side by side
    assert layer(one).shape == (1, 1, 40)
    assert layer(one).dtype == dtype
    assert torch.allclose(layer(one).double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    assert layer.weight.shape == (40, 512)


def test_a_large_layer_is_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, bias, rows = random_matrix("q4_1", 70, 64), torch.randn(70), torch.randn(3, 64)
    whole = PackedLinear(matrix, bias, torch.float32)(rows)
    monkeypatch.setattr(modules, "_TILE_BYTES", 4 * 64 * 16)
    assert torch.allclose(PackedLinear(matrix, bias, torch.float32)(rows), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding(dtype: torch.dtype) -> None:
    matrix = random_matrix("q8_0", 50, 64)
    layer = PackedEmbedding(matrix, None, dtype)
    ids = torch.tensor([[3, 49, 3], [0, 7, 1]])
    assert torch.equal(layer(ids), dequantize(matrix).bfloat16().to(dtype)[ids])


def test_threads_give_the_same_bits(threads: None) -> None:
    matrix, x = random_matrix("q4_1", 301, 288), torch.randn(288)
    given = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        given.append((gemv(matrix, x), dequantize_rows(matrix, 3, 300, torch.empty(301, 288))))
    assert all(torch.equal(y, given[0][0]) and torch.equal(rows, given[0][1]) for y, rows in given)


def test_what_does_not_fit_never_reaches_machine_code() -> None:
    matrix = random_matrix("q4_1", 8, 64)
    for x in (torch.zeros(63), torch.zeros(64).double(), torch.zeros(2, 64), torch.zeros(128)[::2]):
        with refused(ValueError):
            gemv(matrix, x)
    for first, last, room in ((-1, 2, 512), (5, 4, 512), (0, 9, 1024), (0, 8, 511)):
        with refused(ValueError):
            dequantize_rows(matrix, first, last, torch.empty(room))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {"token_embd.weight": "Q8_0", "ffn_down.weight": "Q5_1", "attn_v.weight": "F16", "": "Q4_1"}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=kinds)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_model_keeps_its_weights_packed(quantised: Path, dtype: str) -> None:
    files = resolve(str(quantised))
    plain, packed = (load_model(files, device="cpu", dtype=dtype, packed=packed) for packed in (False, True))
    kinds = {name: layer.matrix.kind for name, layer in packed.model.named_modules() if hasattr(layer, "matrix")}
    assert kinds["model.embed_tokens"] == "q8_0"
    assert kinds["model.layers.1.mlp.down_proj"] == "q5_1"
    assert kinds["model.layers.3.self_attn.q_proj"] == kinds["lm_head"] == "q4_1"
    assert kinds.get("model.layers.3.self_attn.v_proj") == ("bfloat16" if dtype == "float32" else None)
    assert plain.fingerprint == packed.fingerprint == model_fingerprint(files, dtype)
    if dtype == "float32":
        assert (plain.weights, packed.weights) == (dtype, "q4_1, q8_0, q5_1, bfloat16")
        assert not any(weight.is_meta for weight in plain.model.parameters())  # gradients need them
    ours, theirs = Decoder(packed), Decoder(plain)
    stored, expected = (
        prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(tuple(IDS))])[0] for decoder in (ours, theirs)
    )
    assert all(map(torch.equal, (*stored.keys, *stored.values), (*expected.keys, *expected.values)))
    (_, cache), (_, wanted) = ours.prefill(IDS, 8), theirs.prefill(IDS, 8)
    for one, other in zip(cache.buffers, wanted.buffers, strict=True):  # of a prompt, by the order of sums
        for side in ("keys", "values"):
            found, other_side = (getattr(buffer, side)[:, :, : len(IDS)].float() for buffer in (one, other))
            assert float((found - other_side).norm() / other_side.norm()) < ORDER[dtype]
    for token in (7, 300, 21):
        step, other = ours.extend([token], cache)[0], theirs.extend([token], wanted)[0]
        assert float((step - other).norm() / other.norm()) < 0.03


@pytest.mark.parametrize("name", families.KINDS)
def test_a_bfloat16_checkpoint_stays_so_under_float32_arithmetic(name: str, tmp_path: Path) -> None:
    files = resolve(str(save_tiny(name, tmp_path / "model", dtype="bfloat16")))
    plain, kept = (load_model(files, device="cpu", dtype="float32", packed=packed) for packed in (False, True))
    assert (plain.weights, plain.fingerprint) == ("float32", kept.fingerprint)
    laid_out_otherwise = ("mixtral", "deepseek-v2", "deepseek-v3", "glm4-moe-lite")  # their experts, in the file
    assert kept.weights == ("float32" if name in laid_out_otherwise else "bfloat16")
    reference, packed = Decoder(plain), Decoder(kept)
    (expected, _), (logits, _) = (decoder.prefill(IDS) for decoder in (reference, packed))
    assert torch.allclose(logits, expected, atol=1e-4)
    (expected, _), (logits, _) = (decoder.prefill(IDS[:1]) for decoder in (reference, packed))
    assert torch.allclose(logits, expected, atol=1e-4)


WRITABLE = [kind for kind in READERS if not kind.endswith("k")]  # by llama.cpp's library


@pytest.mark.parametrize("kind", WRITABLE)
def test_matrices_have_their_numbers_and_rows(kind: str, tmp_path: Path) -> None:
    """Those of queries and keys, which llama.cpp reorders, included."""
    stored, plain = gguf.GGMLQuantizationType[kind.upper()], dict(tiny_model("llama", "bfloat16").named_modules())
    files = resolve(str(write_gguf(tmp_path / "x.gguf", kinds={"": kind.upper()})))
    packed, unpacked = (load_model(files, device="cpu", dtype="float32", packed=packed) for packed in (True, False))
    for name, layer in packed.model.named_modules():
        if hasattr(layer, "matrix"):
            blocks = gguf.quants.quantize(plain[name].weight.float().numpy(), stored)
            expected = torch.from_numpy(gguf.quants.dequantize(blocks, stored))
            assert layer.matrix.kind == kind
            assert torch.equal(dequantize(layer.matrix), expected)
            assert torch.equal(unpacked.model.get_submodule(name).weight, expected.bfloat16().float())


def test_a_scale_that_is_not_finite_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", kinds={"": "Q4_1"})
    tensor, data = read_header(path).tensors["blk.1.attn_k.weight"], bytearray(path.read_bytes())
    data[tensor.start + 20 : tensor.start + 22] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    for packed in (True, False):
        with refused(ModelError, numbers=True):
            load_model(resolve(str(path)), device="cpu", packed=packed)


def test_a_file_that_changed_under_the_command_is_refused(tmp_path: Path) -> None:
    files = resolve(str(write_gguf(tmp_path / "x.gguf", kinds={"": "Q4_1"})))
    write_gguf(tmp_path / "x.gguf", kinds={"": "Q4_0"})
    with refused(ModelError):
        model_fingerprint(files, "float32")
