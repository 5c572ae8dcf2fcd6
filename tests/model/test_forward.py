"""Our forward gives the numbers of the model's own; a model without a spec is computed by its own."""

from __future__ import annotations

import copy

import pytest
import torch

from kvtool.core.checkpoint.architecture import ATTENTIONS
from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model import cpu_layer
from kvtool.core.model.decode.program import decoding_weights
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import Forward, OnLayer, QueryRows
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.hf.modules import attentions_of
from kvtool.core.model.hf.probing import kinds_of, stated_kinds
from kvtool.core.model.prefill import LeadIn
from kvtool.core.model.spec import TOLERANCE, UnsupportedArchitecture, check_trial, read_model_spec, relative_error
from kvtool.core.native.isa import isa_here
from samples.benchmarks.bench.plain import attention_of_transformers
from tests.families import FAMILIES, tiny_model
from tests.fusion.making import LOSSLESS, NAMES, Case, case, decoder_of, distance, new_case, plain_logits
from tests.spying import calls_of
from tests.wording import refused
from tests.wrappers import WRAPPERS, loaded_text

pytestmark = pytest.mark.skipif(isa_here() is None, reason="there is no machine code for this CPU")
IDS = list(range(5, 45))
# Families of `NAMES` that the model's own modules compute, and why.
ADAPTED = {
    **dict.fromkeys(("minicpm3", "youtu", "deepseek-v2", "deepseek-v3", "glm4-moe-lite"), "latents"),
    **{"gemma4": "different shapes", "gemma4-shared": "attend to what others keep"},
    **{"cohere2": "norms in other places", "glm": "not rotated in halves", "stablelm": "has dropout"},
}
# Root mean square difference by that of the numbers. In bfloat16 most are the same bits; a norm's sum in another order
# moves a last place, and the layers after it differ by no more than that.
NEAR = {"float32": 1e-5, "bfloat16": 1e-2}


def prefilled(decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all rows, some of which were computed apart from the others, and all keys and values."""
    cache = decoder.new_cache(len(IDS))
    cache.set_length(len(IDS))
    logits = []
    for part in (range(30), range(30, len(IDS))):
        rows = QueryRows.of(torch.tensor(part), "cpu")
        logits.append(decoder.compute([IDS[place] for place in part], rows, cache, keep=len(part)))
    sides = [side.flatten() for buffer in cache.buffers for side in (buffer.keys, buffer.values)]
    return torch.cat(logits), torch.cat(sides)


def by_its_own(decoder: Decoder) -> HfForward:
    """Let a decoder compute by the model's own modules."""
    own = vars(decoder)["forward"] = HfForward(decoder, "a test")
    return own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_numbers(name: str, dtype: str) -> None:
    decoder = new_case(name, dtype).decoder
    found = prefilled(decoder)
    assert ADAPTED[name] in decoder.forward.why if name in ADAPTED else isinstance(decoder.forward, Forward)
    by_its_own(decoder)
    for ours, own in zip(found, prefilled(decoder), strict=True):
        ours, own = ours.float(), own.float()
        assert (ours - own).square().mean().sqrt() <= NEAR[dtype] * own.square().mean().sqrt()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_what_is_stored_in_bfloat16_has_the_models_own_bits(name: str) -> None:
    """Where torch adds the squares of a norm in another order (AVX2), some numbers differ in their last bit."""
    decoder, other = (new_case(name, "bfloat16").decoder for _ in range(2))
    by_its_own(other)
    share = 0.0 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 0.02
    for ours, own in zip(LeadIn(decoder, IDS).layers, LeadIn(other, IDS).layers, strict=True):
        for side, expected in zip(ours, own, strict=True):
            assert float((side != expected).float().mean()) <= share
            assert torch.allclose(side.float(), expected.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", [*FAMILIES, *WRAPPERS])
def test_layers_are_what_the_configuration_says(name: str) -> None:
    loaded = loaded_text(name) if name in WRAPPERS else new_case(name, "float32").decoder.loaded
    decoder, config = Decoder(loaded), loaded.model.config
    assert config.model_type in ATTENTIONS or not isinstance(decoder.forward, Forward)
    if stated := not isinstance(loaded.model, DenseModel) and stated_kinds(config):
        asked, _ = kinds_of(decoder.base, attentions_of(decoder.layers, False), config, decoder.dtype, decoder.device)
        assert stated == asked


def test_gradients_and_plain_attention_pass_through_the_models_own() -> None:
    decoder = new_case("llama", "float32").decoder
    prefilled(decoder)
    with attention_of_transformers(decoder):
        decoder.model(input_ids=torch.tensor([IDS])).logits.sum()
    embedded = decoder.base.embed_tokens(torch.tensor([IDS])).detach().requires_grad_()
    decoder.model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None


def test_a_layer_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are all known; what it makes of them is not."""
    decoder = new_case("llama").decoder
    own = type(decoder.layers[0]).forward
    monkeypatch.setattr(type(decoder.layers[0]), "forward", lambda *given, **more: 1.01 * own(*given, **more))
    assert isinstance(decoder.forward, HfForward)
    assert "own forward differs" in decoder.forward.why
    assert len(decoder.base.layers) == len(decoder.layers)


class Ending(OnLayer):
    """Ends a pass at a layer; `seen`: which layers it was called at."""

    def __init__(self, last: int) -> None:
        self.last, self.seen = last, list[int]()

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        self.seen.append(layer)
        return layer == self.last


@pytest.mark.parametrize("own", [False, True])
def test_a_pass_that_is_ended(own: bool) -> None:
    decoder, on_layer = new_case("llama").decoder, Ending(1)
    if own:
        by_its_own(decoder)
    cache = decoder.new_cache(len(IDS))
    cache.set_length(len(IDS))
    decoder.fill_cache(IDS, QueryRows.of(torch.arange(len(IDS)), "cpu"), cache, on_layer=on_layer)
    assert on_layer.seen == [0, 1]


def test_only_wanted_rows_go_through_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = new_case("qwen3").decoder
    expected = prefilled(decoder)[0]
    rows = calls_of(monkeypatch, cpu_layer.CpuLayer, "finish", lambda layer, attended, *_: len(attended))
    cache = decoder.new_cache(len(IDS))
    cache.set_length(len(IDS))
    given = IDS, QueryRows.of(torch.arange(len(IDS)), "cpu"), cache
    assert torch.allclose(decoder.compute(*given, keep=3), expected[-3:], rtol=1e-4, atol=1e-4)
    assert rows == [40, 40, 40, 16]
    rows.clear()
    decoder.fill_cache(*given)
    assert rows == [40, 40, 40]


def test_a_pool_computes_where_all_products_are_our_own(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """In addition to torch's threads, which wait spinning, a pool would only slow them down."""
    decoder = new_case("qwen2", "bfloat16").decoder
    prefilled(decoder)
    asked = calls_of(monkeypatch, cpu_layer, "use_pool", lambda count: count)
    expected = prefilled(decoder)
    assert asked == [1, 1]
    monkeypatch.setattr(cpu_layer, "_in_team", lambda layer, dtype, rows: rows < 30)
    torch.set_num_threads(2)
    found = prefilled(decoder)
    assert asked[2:] == [1, 2]
    LeadIn(decoder, IDS[:20])  # what is stored is computed by torch
    assert asked[4:] == [1]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["gpt-neox", "olmo", "bitnet"])  # others: test_forward.py
def test_what_is_not_known_is_declined_by_name(name: str) -> None:
    with refused(UnsupportedArchitecture):
        read_model_spec(case(name).decoder)


def test_a_parameter_or_module_beside_the_known_ones_is_not_passed_over() -> None:
    gained, adapted = tiny_model("llama"), tiny_model("llama")
    gained.model.layers[2].self_attn.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    adapted.model.layers[1].mlp.add_module("adapter", torch.nn.Linear(64, 64))
    for model in (gained, adapted):
        with refused(UnsupportedArchitecture):
            decoding_weights(decoder_of(model))


@pytest.mark.parametrize("dtype", [dtype for dtype in TOLERANCE if dtype.is_floating_point])
def test_a_trial_takes_rounding_and_nothing_else(dtype: torch.dtype) -> None:
    expected = torch.randn(512, generator=torch.Generator().manual_seed(0))
    check_trial(expected.to(dtype), expected, dtype, layers=1)
    worse = expected * (1 + 1.5 * TOLERANCE[dtype])
    assert relative_error(worse, expected) == pytest.approx(1.5 * TOLERANCE[dtype], rel=1e-2)
    with refused(UnsupportedArchitecture):
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
    with refused(UnsupportedArchitecture):
        decoding_weights(tried.decoder)
