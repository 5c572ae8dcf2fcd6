"""The count of FLOPs, against one by hand on the tiny shape; the roofline; the published sizes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtool.core.checkpoint.support import check_supported
from kvtool.core.model.decoder import Decoder
from samples.benchmarks.bench.machine import Architecture, LayerWork, Machine, flops, full_work, keys_seen, limit_of
from samples.benchmarks.bench.shapes import SHAPES, build_shape, parameter_count, shape_config
from tests.checkpoint.gguf_models import IN_GGUF
from tests.fusion.making import decoder_of

# Of the tiny shape: hidden 64, 4 heads and 2 KV heads of 16, MLP 128, vocabulary 512, 4 layers.
LINEAR = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # Q, K and V, O, the MLP's three
HEAD = 64 * 512
PUBLISHED = {
    **{"qwen2.5-0.5b": 494_032_768, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248},
    **{"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360},
    **{"qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264},
    **{"mistral-7b": 7_248_023_552, "deepseek-v2-lite": 15_706_484_224},
}


@pytest.fixture(scope="module")
def tiny() -> Architecture:
    return Architecture.of(Decoder(build_shape("tiny", "cpu")))


def test_of_experts_those_are_used_that_a_token_is_sent_to() -> None:
    config = IN_GGUF["gemma4-moe"].config()  # two of four
    layers = Architecture.of(decoder_of(AutoModelForCausalLM.from_config(config))).layers
    assert all(layer.held - layer.used == 2 * (256 * 256 + 256 * 128) for layer in layers)


def test_full_prefill_by_hand(tiny: Architecture) -> None:
    keys = 1 + 2 + 3 + 4 + 5
    a_layer = 2 * 5 * LINEAR + 2 * (2 * 64 * keys)  # Q Kᵀ and P V: 64 products each for every row and key
    assert flops(tiny, [full_work(5, (None,) * 4)]) == 4 * a_layer + 2 * HEAD


def test_rows_that_see_through_a_window() -> None:
    assert keys_seen([2, 4]) == 3 + 5
    assert keys_seen([0, 2, 4, 9], 3) == 1 + 3 + 3 + 3
    assert full_work(5, (None, 2)) == (LayerWork(5, 15), LayerWork(5, 9))


def test_the_roofline_takes_the_slower_of_products_and_weights(tiny: Architecture) -> None:
    one_row = (LayerWork(1, 1),) * 4
    of_products = Machine(
        gemm_flop_per_s=1e3, weights_bytes_per_s=1e12, memcpy_bytes_per_s=1e6, upload_bytes_per_s=None
    )
    limit = limit_of(of_products, tiny, 2, [one_row], bytes_read=2000)
    assert limit.compute_ms == pytest.approx(flops(tiny, [one_row]))
    assert limit.load_ms == pytest.approx(2.0)
    assert limit.ms == limit.compute_ms
    of_weights = Machine(1e12, 1e3, 1e2, None)
    assert limit_of(of_weights, tiny, 2, [one_row], 0).compute_ms == pytest.approx(2 * (4 * LINEAR + HEAD))
    assert of_weights.best(of_products).gemm_flop_per_s == 1e12


@pytest.mark.some(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_sizes(name: str) -> None:
    assert parameter_count(name) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "billions"), [("gemma-4-26b-a4b", 25.2), ("gemma-4-31b", 30.7)])
def test_shapes_have_the_published_rounded_sizes(name: str, billions: float) -> None:
    assert round(parameter_count(name) / 1e9, 1) == billions


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_supported(name: str) -> None:
    check_supported(shape_config(name))


def test_a_built_shape_is_whole_and_the_same_every_time() -> None:
    model, again = build_shape("tiny", "cpu").model, build_shape("tiny", "cpu").model
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count("tiny")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with torch.inference_mode():
        logits = model(torch.arange(40)[None]).logits.float()
    assert torch.isfinite(logits).all()
    assert float(logits.std()) > 0
    fresh = type(model.model.rotary_emb)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)
