"""Every architecture that is read from GGUF: packed weights and real metadata, exactly the model they were made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtool.core.model.decoder import Decoder
from kvtool.core.model.load import load_model
from kvtool.core.model.quantised.folder import read_packed
from kvtool.core.model.resolve import resolve
from kvtool.core.session.laws import check_laws
from tests.fusion.making import CHUNKS, PREFIX
from tests.model.gguf_models import IN_GGUF
from tests.model.gguf_writing import written


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
    assert check_laws(Decoder(loaded), "", PREFIX, CHUNKS[:2]).passed
    assert {matrix.kind for matrix in read_packed(files.folder).values()} & {"q4_k", "q5_k", "q6_k"}
