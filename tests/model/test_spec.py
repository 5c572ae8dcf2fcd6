"""Specification of a model's layers as read, and layers that no fast path may compute."""

from __future__ import annotations

import copy

import pytest
import torch

from kvtool.core.model.decode.program import decoding_weights
from kvtool.core.model.spec import TOLERANCE, UnsupportedArchitecture, check_trial, read_model_spec, relative_error
from tests.families import tiny_model
from tests.fusion.making import LOSSLESS, Case, case, decoder_of, distance, plain_logits


@pytest.mark.parametrize(
    ("name", "why"),
    [("gpt-neox", "has attention"), ("olmo", "clipped"), ("bitnet", "has attn_sub_norm")],  # others: test_forward.py
)
def test_what_is_not_known_is_declined_by_name(name: str, why: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=why):
        read_model_spec(case(name).decoder)


def test_a_parameter_or_module_beside_the_known_ones_is_not_passed_over() -> None:
    gained, adapted = tiny_model("llama"), tiny_model("llama")
    gained.model.layers[2].self_attn.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    adapted.model.layers[1].mlp.add_module("adapter", torch.nn.Linear(64, 64))
    for model, why in ((gained, "LlamaAttention has gain"), (adapted, "has adapter")):
        with pytest.raises(UnsupportedArchitecture, match=why):
            decoding_weights(decoder_of(model))


@pytest.mark.parametrize("dtype", [dtype for dtype in TOLERANCE if dtype.is_floating_point])
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
    assert tried.decoder.forward.why == ""
    with torch.inference_mode():
        plain = untouched(input_ids=torch.tensor([list(plan.ids)]), use_cache=False).logits[0, -1]
        assert distance(fused.logits, plain) <= 1e-4
        assert distance(fused.logits, plain_logits("llama", "float32", tuple(plan.ids))) > 1
    with pytest.raises(UnsupportedArchitecture, match="LargestNorm is no root mean square norm"):
        decoding_weights(tried.decoder)
