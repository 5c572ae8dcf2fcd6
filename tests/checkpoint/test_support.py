"""Refused architectures, by reason, on the real configuration classes; and the text model of a multimodal checkpoint.

It is found by what the files hold, and loaded without the rest.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model, supported_config
from kvtool.core.checkpoint.support import TextNames, check_supported, context_limit, names_among
from kvtool.core.errors import ModelError
from kvtool.core.model import rope
from kvtool.core.session.gate import check_invariants
from tests.families import SHAPE, filled, save_tiny, tiny_model
from tests.fusion.making import CHUNKS, PREFIX, decoder_of, plain_model
from tests.wording import refused
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS, text_model

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PHI4_MINI = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
_STATES_AND_WINDOWS = ["linear_attention", "sliding_attention"] * 24
REFUSED: list[Any] = [
    *(t.DeepseekV32Config, t.MambaConfig, t.Mamba2Config, t.BambaConfig, t.GraniteMoeHybridConfig),
    *(partial(t.Qwen3NextConfig, layer_types=_STATES_AND_WINDOWS), t.Phi4MultimodalConfig, t.PaliGemmaConfig),
    *(t.MllamaConfig, partial(t.LlavaConfig, text_config=t.OPTConfig()), t.GPT2Config, t.OPTConfig, t.BloomConfig),
    *(t.MptConfig, partial(t.FalconConfig, alibi=True), t.RwkvConfig, t.BertConfig, t.T5Config, t.BartConfig),
]


@pytest.mark.parametrize("config", REFUSED)
def test_refused_with_its_reason(config: Any) -> None:
    with refused(ModelError):
        check_supported(config())


@pytest.mark.parametrize(
    "config",
    [
        *(partial(t.HunYuanDenseV1Config, head_dim=16), partial(t.HunYuanMoEV1Config, head_dim=16), t.DiffLlamaConfig),
        *(t.GPTNeoXJapaneseConfig, t.FalconConfig, partial(t.MistralConfig, head_dim=16, sliding_window=0)),
        partial(t.MistralConfig, head_dim=16, sliding_window=-5),
        partial(t.Gemma2Config, head_dim=16, attn_logit_softcapping=0.0),
        partial(t.Gemma2Config, head_dim=16, sliding_window=None),
    ],
)
def test_what_only_the_built_model_shows_is_refused(config: Any) -> None:
    with refused(ModelError):
        decoder_of(filled(t.AutoModelForCausalLM.from_config(config(**SHAPE))))


def test_a_window_that_a_family_does_not_know_is_none() -> None:
    model = filled(t.AutoModelForCausalLM.from_config(t.LlamaConfig(**SHAPE, sliding_window=20)))
    decoder = decoder_of(model)
    assert {kind.window for kind in decoder.kinds} == {None}
    assert model.config.sliding_window == 20
    assert check_invariants(decoder, "", PREFIX, CHUNKS).passed


def test_keys_that_are_rotated_in_an_unknown_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope.Layout, "rotate", lambda self, keys, angles: keys * 0)
    with refused(ModelError):
        decoder_of(tiny_model("minicpm3"))


def test_a_position_of_three_parts_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("qwen2-vl")
    own = type(model.model.rotary_emb).forward

    def forward(module: Any, like: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return own(module, like, position_ids + (position_ids.ndim == 3))

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", forward)
    with refused(ModelError):
        decoder_of(model)


def test_a_window_of_masks_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(t.AutoModelForCausalLM.from_config(t.LlamaConfig(**SHAPE, sliding_window=20)))
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    with refused(ModelError):
        decoder_of(model)


@pytest.mark.parametrize(
    "config",
    [
        t.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=4),
        t.Phi3Config(sliding_window=2047),
        t.LlamaConfig(rope_parameters={"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ],
    ids=lambda config: config.model_type,
)
def test_supported(config: Any) -> None:
    check_supported(config)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (t.LlamaConfig(max_position_embeddings=4096), 4096),
        (t.Phi3Config(**PHI4_MINI, rope_parameters=dict(LONGROPE)), 4096),  # then it takes its long factors
        (t.LlamaConfig(max_position_embeddings=4096, rope_parameters=dict(DYNAMIC)), 4096),
        # no layer sees further back, and none has to
        (t.MistralConfig(max_position_embeddings=32768, sliding_window=4096), 32768),
        (t.Phi3Config(max_position_embeddings=4096, sliding_window=2047), 4096),
        (t.Qwen2Config(max_position_embeddings=32768, rope_parameters=dict(YARN)), 131072),
        (t.LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(LLAMA3)), 131072),
    ],
)
def test_context_limit(config: Any, limit: int) -> None:
    assert context_limit(config) == limit


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
        with refused(ModelError, numbers=True):
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
    with refused(ModelError, numbers=True):
        load_model(resolve(str(folder)), device="cpu")
