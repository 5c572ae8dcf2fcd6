"""The text model of a multimodal checkpoint is found by what its files hold, and loaded without the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model, supported_config
from kvtool.core.checkpoint.text_submodel import TextNames, names_among
from kvtool.core.errors import ModelError
from tests.families import save_tiny
from tests.fusion.making import plain_model
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS

IDS = torch.arange(5, 60)[None]


def table(*names: str, shape: tuple[int, int] = (512, 64)) -> dict[str, Any]:
    return {name: {"shape": list(shape)} for name in names}


@pytest.mark.parametrize(
    ("base", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),  # as LLaVA, Gemma 3 and Mistral 3 are published
        ("model.language_model.", "lm_head."),  # Qwen3-VL
        ("model.", "lm_head."),  # Qwen2.5-VL
        ("model.text_model.", None),  # SmolVLM
    ],
)
def test_names_as_they_are_published(base: str, head: str | None) -> None:
    names = [f"{base}embed_tokens.weight", "visual.blocks.0.attn.qkv.weight"]
    found = names_among(table(*names, *([] if head is None else [head + "weight"])), (512, 64))
    assert found == TextNames(base, head)
    assert found.own(f"{base}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert found.own("visual.blocks.0.attn.qkv.weight") is None
    if head is not None:
        assert found.own(head + "weight") == "lm_head.weight"


def test_an_embedding_of_another_shape_is_not_the_texts() -> None:
    tables = table("model.embed_tokens.weight") | table("audio.embed_tokens.weight", shape=(100, 64))
    assert names_among(tables, (512, 64)).base == "model."
    for names in (("model.embed.weight",), ("a.embed_tokens.weight", "b.embed_tokens.weight")):
        with pytest.raises(ModelError, match="embeddings of 512 tokens"):
            names_among(table(*names), (512, 64))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*WRAPPERS, *HYBRID_WRAPPERS])
def test_what_the_whole_model_says_of_text(name: str, packed: bool, tmp_path: Path) -> None:
    """From a checkpoint in bfloat16, with arithmetic in float32: packed weights stay as they are in the file."""
    files = resolve(str(save_tiny(name, tmp_path / "model", dtype="bfloat16")))
    loaded = load_model(files, device="cpu", dtype="float32", packed=packed)
    whole = plain_model(name, "bfloat16").float()
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(IDS).logits, whole(input_ids=IDS).logits, atol=1e-4, rtol=1e-4)
    plain_model.cache_clear()
    assert loaded.weights == (
        "bfloat16" if packed and name not in ("glm4v-moe", "kimi-k2.5") else "float32"
    )  # its experts' weights are joined
    assert supported_config(files).num_hidden_layers == 4


def test_a_missing_weight_of_the_text_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-vl", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if name.endswith("layers.2.mlp.down_proj.weight"))
    del weights[gone]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="1 are missing"):
        load_model(resolve(str(folder)), device="cpu")
