"""Attention over latents, against the modules' own forward, and what is kept for it."""

from __future__ import annotations

import copy

import pytest
import torch

from kvtool.core.errors import ModelError
from kvtool.core.model.hf.modules import IMPLEMENTATION, Latents
from kvtool.core.model.prompt_cache import KVShape
from samples.benchmarks.bench.plain import attention_of_transformers
from tests.families import FAMILIES, tiny_model
from tests.fusion.making import CHUNKS, PREFIX, QUESTION, case, decoder_of, distance, plain_logits
from tests.spying import calls_of
from tests.wording import refused

NAMES = [name for name in FAMILIES if hasattr(FAMILIES[name](), "kv_lora_rank")]


@pytest.mark.parametrize("name", NAMES)
def test_a_latent_and_a_rotary_key_are_kept(name: str) -> None:
    decoder = case(name).decoder
    config = decoder.config
    shape = KVShape(1, config.qk_rope_head_dim, config.kv_lora_rank, joint=True)
    assert set(decoder.shapes) == {shape}
    assert decoder.kv_bytes(1) == 4 * len(decoder.layers) * (config.qk_rope_head_dim + config.kv_lora_rank)
    assert decoder.plain_shape is None


@pytest.mark.parametrize("name", NAMES)
def test_under_another_attention_the_module_is_as_it_was(name: str) -> None:
    ids = (*PREFIX, *CHUNKS[0])
    decoder = decoder_of(tiny_model(name))
    with attention_of_transformers(decoder), torch.inference_mode():
        logits = decoder.model(input_ids=torch.tensor([ids]), use_cache=True).logits[0, -1]
    assert distance(logits, plain_logits(name, "float32", ids, "sdpa")) <= 1e-5


def test_many_rows_take_heads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the count of multiplications; both ways give the same."""
    decoder, ids = decoder_of(tiny_model("youtu")), tuple(range(5, 405))
    expanded = calls_of(monkeypatch, Latents, "heads_of", lambda _, joint: joint.shape[2])
    _, cache = decoder.prefill(ids, reserve=len(QUESTION))
    assert expanded == [len(ids)] * len(decoder.layers)
    logits = decoder.extend(QUESTION, cache)
    assert len(expanded) == len(decoder.layers)
    whole, _ = decoder.prefill((*ids, *QUESTION))
    monkeypatch.setattr(Latents, "should_expand", lambda *sizes: False)
    again, _ = decoder.prefill((*ids, *QUESTION))
    assert distance(logits[-1], whole) <= 1e-4
    assert distance(again, whole) <= 1e-4


class _InAnotherLayout(torch.nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.hidden)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_another_layout(dtype: str) -> None:
    """A packed product is asked for its weights: the same to the bit."""
    model = tiny_model("youtu", dtype)
    plain, _ = decoder_of(copy.deepcopy(model)).prefill((*PREFIX, *CHUNKS[1]))
    for layer in model.model.layers:
        product = layer.self_attn.kv_b_proj
        other = _InAnotherLayout(product.in_features, product.out_features, bias=False)
        other.hidden, other.weight = product.weight.detach(), None
        layer.self_attn.kv_b_proj = other
    packed, _ = decoder_of(model).prefill((*PREFIX, *CHUNKS[1]))
    assert torch.equal(plain, packed)


def test_what_is_not_known_is_refused() -> None:
    attention = tiny_model("minicpm3").model.layers[0].self_attn
    attention.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(attention.kv_b_proj.out_features))
    with refused(ModelError):
        Latents(attention, IMPLEMENTATION)
