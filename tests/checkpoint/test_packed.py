"""Packed weights of a converted folder: every kind is found under any name and in any row order, and no other is."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvtool.core.checkpoint import packed as packing
from kvtool.core.checkpoint.files import PACKED
from kvtool.core.checkpoint.gguf.header import read_header
from kvtool.core.checkpoint.packed import pack_folder, read_packed
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS
from tests.checkpoint.gguf_files import finish
from tests.kernels.linear.blocks import COLUMNS, HALVES, ROWS, random_blocks
from tests.kernels.linear.reference import dequantize

NAME = "model.layers.0.self_attn.q_proj.weight"


def write(path: Path, kind: str, blocks: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    stored = gguf.GGMLQuantizationType[kind.upper()]
    writer.add_tensor("blk.0.attn_q.weight", blocks.reshape(ROWS, -1), raw_dtype=stored)
    finish(writer)
    return path


def weight(kind: str, blocks: np.ndarray) -> torch.Tensor:
    """What the reference makes of blocks, rounded as a converted folder is."""
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
    return torch.from_numpy(values.reshape(ROWS, COLUMNS).copy()).bfloat16()


def packed(folder: Path, kind: str, blocks: np.ndarray) -> dict[str, packing.QuantizedTensor]:
    gguf_file = write(folder / "x.gguf", kind, blocks)
    pack_folder(folder, gguf_file, read_header(gguf_file))
    return read_packed(folder)


@pytest.mark.parametrize("kind", READERS)
def test_every_kind_is_found_in_another_order_of_rows(kind: str, tmp_path: Path) -> None:
    blocks = random_blocks(kind)
    order = torch.tensor([2, 0, 1])
    wanted = weight(kind, blocks)[order].contiguous()
    save_file({NAME: wanted, "other.weight": torch.zeros(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    (found,) = (matrices := packed(tmp_path, kind, blocks)).values()
    assert list(matrices) == [NAME]
    assert found.kind == kind
    assert torch.equal(dequantize(found).bfloat16(), wanted)


def test_two_weights_of_the_same_numbers(tmp_path: Path) -> None:
    blocks = random_blocks("q4_k")
    wanted = weight("q4_k", blocks)
    save_file({NAME: wanted, "other.weight": wanted.clone()}, tmp_path / "model.safetensors")
    assert packed(tmp_path, "q4_k", blocks).keys() == {NAME, "other.weight"}


def test_a_weight_that_is_not_the_tensor_stays_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that differs by the last bit of one number, under the same sum of marks."""
    blocks = random_blocks("q4_0")
    other = weight("q4_0", blocks)
    other.view(torch.int16)[1, 7] ^= 1
    save_file({NAME: other}, tmp_path / "model.safetensors")
    assert packed(tmp_path, "q4_0", blocks) == {}
    monkeypatch.setattr(packing, "_row_hashes", lambda rows: torch.arange(len(rows)))
    assert packed(tmp_path, "q4_0", blocks) == {}


@pytest.mark.parametrize("kind", READERS)
def test_scales_that_are_no_numbers_are_an_error_of_the_file(kind: str, tmp_path: Path) -> None:
    blocks = random_blocks(kind)
    save_file({NAME: weight(kind, blocks)}, tmp_path / "model.safetensors")
    start = HALVES[kind][-1]
    blocks[1, start : start + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match="not a finite number"):
        packed(tmp_path, kind, blocks)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    blocks = random_blocks("q4_1")
    save_file({NAME: weight("q4_1", blocks)}, tmp_path / "model.safetensors")
    packed(tmp_path, "q4_1", blocks)
    whole = (tmp_path / PACKED).read_bytes()
    for bad in (whole[:-1], whole[:20], b"", whole.replace(b"q4_1", b"q4_0"), whole.replace(b"q4_1", b"q9_9")):
        (tmp_path / PACKED).write_bytes(bad)
        with pytest.raises(ModelError, match=PACKED):
            read_packed(tmp_path)
