"""Specification of a model's layers as read, and layers that no fast path may compute."""

from __future__ import annotations

import copy

import pytest
import torch

from kvtool.core.model.decode.program import decoding_weights
from kvtool.core.model.spec import TOLERANCE, UnsupportedArchitecture, check_trial, read_model_spec, relative_error
from tests.families import tiny_model
from tests.fusion.making import LOSSLESS, Case, case, decoder_of, distance, plain_logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "norms", "adds_one", "rounds_first"),
    [("llama", 2, False, True), ("olmo2", 2, False, False), ("gemma", 2, True, False), ("gemma3", 4, True, False)],
)
def test_norms(name: str, norms: int, adds_one: bool, rounds_first: bool, dtype: str) -> None:
    for layer in case(name, dtype).decoder.spec.layers:
        found = [norm for norm in (*layer.before, *layer.after) if norm is not None]
        assert len(found) == norms
        assert all(norm.is_rms and norm.adds_one == adds_one for norm in found)
        if dtype == "bfloat16":
            assert {norm.rounds_first for norm in found} == {rounds_first}
    assert (layer.before == (None, None)) == (name == "olmo2")


@pytest.mark.parametrize(("name", "by_head"), [("qwen3", True), ("olmo2", False)])
def test_norms_of_heads(name: str, by_head: bool) -> None:
    layer = case(name).decoder.spec.layers[0]
    assert layer.head_norms is not None
    assert layer.normed_by_head == by_head


@pytest.mark.parametrize(("name", "fused"), [("llama", False), ("phi3", True)])
def test_fused_products_are_rows_of_one(name: str, fused: bool) -> None:
    layer = case(name).decoder.spec.layers[0]
    mlp = layer.gated_mlp()
    assert (layer.query.module is layer.value.module) == (mlp.gate.module is mlp.up.module) == fused
    assert [part.rows for part in (layer.query, layer.key, layer.value)] == [64, 32, 32]
    assert layer.value.first == (96 if fused else 0)


def test_multipliers_windows_and_ropes() -> None:
    granite = case("granite").decoder.spec
    assert (granite.logits, granite.layers[0].residual, granite.layers[0].scale) == (0.5, 0.8, 0.2)
    gemma3 = case("gemma3").decoder.spec
    assert [layer.kind.window for layer in gemma3.layers] == [96, 96, None, 96]
    assert len({layer.kind.rotation for layer in gemma3.layers}) == 2
    assert gemma3.activation == "gelu_tanh"
    assert [layer.rotary for layer in case("smollm3").decoder.spec.layers] == [16, 0, 16, 16]
    assert [case(name, "bfloat16").decoder.spec.rope_in_float32 for name in ("olmo2", "llama")] == [True, False]


@pytest.mark.parametrize(
    ("name", "why"),
    [("gpt-neox", "has attention"), ("olmo", "clipped"), ("bitnet", "has attn_sub_norm")],  # others: test_forward.py
)
def test_what_is_not_known_is_declined_by_name(name: str, why: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=why):
        read_model_spec(case(name).decoder)


def test_a_parameter_beside_the_modules_is_not_passed_over() -> None:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(UnsupportedArchitecture, match="LlamaAttention has gain"):
        read_model_spec(decoder_of(model))


def test_reading_changes_nothing() -> None:
    model = tiny_model("qwen3")
    before = copy.deepcopy(model.state_dict())
    read_model_spec(decoder_of(model))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_trial_takes_rounding_and_nothing_else(dtype: torch.dtype) -> None:
    expected = torch.randn(512, generator=torch.Generator().manual_seed(0))
    check_trial(expected.to(dtype), expected, dtype, layers=1)
    worse = expected * (1 + 1.5 * TOLERANCE[dtype])
    assert relative_error(worse, expected) == pytest.approx(1.5 * TOLERANCE[dtype], rel=1e-2)
    with pytest.raises(UnsupportedArchitecture, match="own forward differs"):
        check_trial(worse, expected, dtype, layers=1)
    check_trial(worse, expected, dtype, layers=4)
    with pytest.raises(UnsupportedArchitecture):
        check_trial(expected * torch.nan, expected, dtype, layers=100)


class LargestNorm(torch.nn.Module):
    """A norm that no code of the product knows: by the largest number in place of the root mean square."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.variance_epsilon = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden / (hidden.abs().amax(-1, keepdim=True) + self.variance_epsilon)


def test_a_norm_that_nobody_knows_needs_no_file() -> None:
    """A family with a new norm is served at once: fused layers call its module, native decoding declines by name."""
    model = tiny_model("llama")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, LargestNorm(child.weight.data))
    untouched = copy.deepcopy(model)
    tried = Case("llama", "float32", decoder_of(model))
    assert not any(norm.is_rms for layer in tried.decoder.spec.layers for norm in layer.norms)
    plan = tried.plan()
    fused = tried.fuse(plan, LOSSLESS["union"], reserve=8)
    assert tried.decoder.passes.why == ""
    with torch.inference_mode():
        plain = untouched(input_ids=torch.tensor([list(plan.ids)]), use_cache=False).logits[0, -1]
        assert distance(fused.logits, plain) <= 1e-4
        assert distance(fused.logits, plain_logits("llama", "float32", tuple(plan.ids))) > 1
    with pytest.raises(UnsupportedArchitecture, match="LargestNorm is no root mean square norm"):
        decoding_weights(tried.decoder)
