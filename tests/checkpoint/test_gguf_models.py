"""Every architecture that is read from GGUF: packed weights and real metadata, exactly the model they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.checkpoint.packed import read_packed
from kvtool.core.errors import ModelError
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.gate import check_invariants
from tests.checkpoint.gguf_models import IN_GGUF
from tests.checkpoint.gguf_writing import written
from tests.fusion.making import CHUNKS, PREFIX


@pytest.mark.some(3)
@pytest.mark.some(5)
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_file_is_its_model(name: str, tmp_path: Path) -> None:
    model = written(tmp_path / "x.gguf", IN_GGUF[name])
    files = resolve(str(tmp_path / "x.gguf"))
    loaded = load_model(files, device="cpu", dtype="float32", packed=True)
    ids = torch.arange(5, 130)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        assert torch.allclose(loaded.model(ids).logits, wanted, atol=1e-4)
    assert wanted.std() > 0.5
    assert check_invariants(Decoder(loaded), "", PREFIX, CHUNKS[:2]).passed
    assert {matrix.kind for matrix in read_packed(files.folder).values()} & {"q4_k", "q5_k", "q6_k"}


def test_experts_of_two_packings_are_refused_with_what_it_would_need(tmp_path: Path) -> None:
    """Where `transformers` makes one weight of both; its own error refers to a report that nobody sees."""
    mixed = replace(IN_GGUF["qwen3.5-moe"], packed_as={"blk.1.ffn_up_exps.weight": "Q5_K"})
    written(tmp_path / "x.gguf", mixed)
    with pytest.raises(ModelError, match=r"in 1 layers, first blk\.1\.ffn_gate_exps\.weight.*would need") as caught:
        resolve(str(tmp_path / "x.gguf"))
    assert "packs both alike" in caught.value.hint
