"""Weights of a GGUF file as a model has them in memory: packed as in the file, each under its name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvtool.core.checkpoint.gguf.header import read_header
from kvtool.core.checkpoint.hub import model_fingerprint, resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS
from tests.checkpoint.gguf_files import write_gguf
from tests.families import tiny_model
from tests.kernels.linear.reference import dequantize

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
        with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight' is damaged: a scale is not a finite number"):
            load_model(resolve(str(path)), device="cpu", packed=packed)


def test_a_file_that_changed_under_the_command_is_refused(tmp_path: Path) -> None:
    files = resolve(str(write_gguf(tmp_path / "x.gguf", kinds={"": "Q4_1"})))
    write_gguf(tmp_path / "x.gguf", kinds={"": "Q4_0"})
    with pytest.raises(ModelError, match="has changed"):
        model_fingerprint(files, "float32")
