"""Which architectures are refused, by reason, on the real configuration classes."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as t

from kvtool.core.errors import ModelError
from kvtool.core.model.support import check_model, check_supported, context_limit
from tests.families import FAMILIES, tiny_model

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PHI4_MINI = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}

REFUSED: list[tuple[str, Any, str]] = [
    ("mla", lambda: t.DeepseekV3Config(), "MLA"),
    ("mla-v2", lambda: t.DeepseekV2Config(), "MLA"),
    ("gemma2", lambda: t.Gemma2Config(), "softcapping"),
    ("gemma3", lambda: t.Gemma3TextConfig(), "mixes"),
    ("cohere2", lambda: t.Cohere2Config(), "mixes"),
    ("olmo3", lambda: t.Olmo3Config(), "mixes"),
    ("qwen2-windows", lambda: t.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=4), "mixes"),
    ("llama4", lambda: t.Llama4TextConfig(), "mixes"),
    ("gpt-oss", lambda: t.GptOssConfig(), "sinks"),
    ("mamba", lambda: t.MambaConfig(), "recurrent"),
    ("mamba2", lambda: t.Mamba2Config(), "recurrent"),
    ("jamba", lambda: t.JambaConfig(), "recurrent"),
    ("bamba", lambda: t.BambaConfig(), "recurrent"),
    ("qwen3-next", lambda: t.Qwen3NextConfig(), "recurrent"),
    ("granite-hybrid", lambda: t.GraniteMoeHybridConfig(), "recurrent"),
    ("minimax", lambda: t.MiniMaxConfig(), "recurrent"),
    ("lfm2", lambda: t.Lfm2Config(full_attn_idxs=[2, 5]), "recurrent"),
    ("qwen2-vl", lambda: t.Qwen2VLConfig(), "multimodal"),
    ("qwen2-vl-text", lambda: t.Qwen2VLTextConfig(rope_parameters=dict(SECTIONS)), "M-RoPE"),
    ("gpt2", lambda: t.GPT2Config(), "no rotary"),
    ("opt", lambda: t.OPTConfig(), "no rotary"),
    ("bloom", lambda: t.BloomConfig(), "no rotary"),
    ("mpt", lambda: t.MptConfig(), "no rotary"),
    ("falcon-alibi", lambda: t.FalconConfig(alibi=True), "ALiBi"),
    ("rwkv", lambda: t.RwkvConfig(), "no rotary"),
    ("bert", lambda: t.BertConfig(), "no rotary"),
    ("t5", lambda: t.T5Config(), "encoder-decoder"),
    ("bart", lambda: t.BartConfig(), "encoder-decoder"),
]


@pytest.mark.parametrize(("config", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_with_its_reason(config: Any, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_supported(config())
    assert reason in caught.value.message
    assert "Llama" in caught.value.hint


@pytest.mark.parametrize("name", FAMILIES)
def test_supported_families(name: str) -> None:
    check_supported(FAMILIES[name]())


@pytest.mark.parametrize(
    "config",
    [
        t.MistralConfig(),  # one window for all layers
        t.Phi3Config(sliding_window=2047),
        t.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=32),  # no layer is beyond it
        t.SmolLM3Config(),
        t.OlmoeConfig(),
        t.LlamaConfig(rope_parameters={"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ],
    ids=lambda config: config.model_type,
)
def test_supported(config: Any) -> None:
    check_supported(config)


def test_sinks_among_the_weights() -> None:
    model = tiny_model("llama")
    check_model(model)
    import torch

    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match="sinks"):
        check_model(model)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (t.LlamaConfig(max_position_embeddings=4096), 4096),
        (t.Phi3Config(**PHI4_MINI, rope_parameters=dict(LONGROPE)), 4096),  # then it takes its long factors
        (t.LlamaConfig(max_position_embeddings=4096, rope_parameters=dict(DYNAMIC)), 4096),
        (t.MistralConfig(max_position_embeddings=32768, sliding_window=4096), 4096),
        (t.MistralConfig(max_position_embeddings=32768, sliding_window=None), 32768),
        (t.Phi3Config(max_position_embeddings=4096, sliding_window=2047), 2047),
        (t.Qwen2Config(max_position_embeddings=32768, use_sliding_window=False, sliding_window=4096), 32768),
        (
            t.Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            ),
            131072,
        ),
        (
            t.LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            ),
            131072,
        ),
        (t.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0), 64),
    ],
)
def test_context_limit(config: Any, limit: int) -> None:
    assert context_limit(config) == limit
