"""Rows of the fused layers are the model's own, and an unknown layer runs the model's own forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtool.core.model import decoder as decoder_module
from kvtool.core.model import layer_cpu
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.layer_cpu import FusedDecoderLayer, install_fused_layers
from kvtool.core.model.modules import own_class, swapped_by
from kvtool.core.model.prefill import LeadIn
from kvtool.core.model.spec import UnsupportedArchitecture
from kvtool.core.native.isa import isa_here
from tests.fusion.making import NAMES, new_case
from tests.spying import calls_of

pytestmark = pytest.mark.skipif(isa_here() is None, reason="there is no machine code for this CPU")
IDS = list(range(5, 45))
# Families of `NAMES` whose rows the model's own layers compute, and why.
UNFUSED = {
    **dict.fromkeys(("gemma2", "gpt-oss"), "capped scores or sinks"),
    **dict.fromkeys(("minicpm3", "youtu", "deepseek-v2", "deepseek-v3", "glm4-moe-lite"), "latents"),
    **{"gemma4": "different shapes", "gemma4-shared": "attend to what others keep"},
    **{"cohere2": "norms in other places", "glm": "not rotated in halves", "stablelm": "has dropout"},
}
# Root mean square difference by that of the numbers. In bfloat16 most are the same bits; a norm's sum in another order
# moves a last place, and the layers after it differ by no more than that.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


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


def counted(name: str, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> tuple[Decoder, list[int]]:
    """Make a decoder, and collect a number for each layer that it computes the quick way from its second pass on."""
    decoder = new_case(name, dtype).decoder
    prefilled(decoder)
    return decoder, calls_of(
        monkeypatch, FusedDecoderLayer, "compute", lambda layer, *given: layer.spec.module.self_attn.layer_idx
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_numbers(name: str, dtype: str) -> None:
    decoder = new_case(name, dtype).decoder
    decoder.unfused = "as if it had been tried"
    expected = prefilled(decoder)
    decoder.unfused = None
    found = prefilled(decoder)
    assert decoder.unfused is not None
    assert UNFUSED[name] in decoder.unfused if name in UNFUSED else not decoder.unfused
    for ours, own in zip(found, expected, strict=True):
        ours, own = ours.float(), own.float()
        assert (ours - own).square().mean().sqrt() <= TOLERANCE[dtype] * own.square().mean().sqrt()


def test_a_pass_of_rows_takes_it_at_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, quick = counted("qwen3", monkeypatch)
    prefilled(decoder)
    assert quick == [*range(len(decoder.layers))] * 2


def _hooked(decoder: Decoder) -> Callable[[], None]:
    return decoder.layers[1].self_attn.register_forward_hook(lambda *_: None).remove


def _another_mlp(decoder: Decoder) -> Callable[[], None]:
    mlp: Any = decoder.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)
    return lambda: vars(mlp).pop("forward")


@pytest.mark.parametrize("touch", [_hooked, _another_mlp])
def test_a_layer_that_someone_has_touched_is_the_models_own(
    touch: Callable[[Decoder], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, quick = counted("llama", monkeypatch)
    undo = touch(decoder)
    prefilled(decoder)
    assert quick == [0, 2, 3] * 2
    undo()
    prefilled(decoder)
    assert quick[6:] == [0, 1, 2, 3] * 2


def test_gradients_and_plain_attention_pass_through_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, quick = counted("llama", monkeypatch)
    with decoder.plain_attention():
        decoder.model(input_ids=torch.tensor([IDS])).logits.sum()
    embedded = decoder.base.embed_tokens(torch.tensor([IDS])).detach().requires_grad_()
    decoder.model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert not quick


def test_a_layer_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are all known; what it makes of them is not."""
    decoder = new_case("llama").decoder
    own = type(decoder.layers[0]).forward
    monkeypatch.setattr(type(decoder.layers[0]), "forward", lambda *given, **more: 1.01 * own(*given, **more))
    with pytest.raises(UnsupportedArchitecture, match="own forward differs"):
        install_fused_layers(decoder, decoder.spec)
    assert not any(map(swapped_by, decoder.layers))


def test_what_is_stored_is_the_models_own_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of a store follows a lead-in: with other bits, later chunks would not match earlier ones."""
    plain = new_case("llama", "bfloat16").decoder
    plain.unfused = "as if it had been tried"
    decoder, quick = counted("llama", monkeypatch, "bfloat16")
    for ours, own in zip(LeadIn(decoder, IDS).layers, LeadIn(plain, IDS).layers, strict=True):
        assert all(map(torch.equal, ours, own))
    assert decoder.unfused == ""
    assert not quick


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_norms_that_were_changed_are_the_models(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    decoder, quick = counted("llama", monkeypatch, "bfloat16")
    weight = decoder.layers[1].input_layernorm.weight
    if change == "in place":
        with torch.no_grad():
            weight.mul_(1.7)
    else:
        weight.data = weight.data * 1.7
    prefilled(decoder)
    assert set(quick) == {0, 2, 3}


def test_who_listens_deep_inside_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = new_case("qwen3", "float32").decoder
    prefilled(decoder)
    heard: list[int] = []
    decoder.layers[1].self_attn.q_norm.register_forward_hook(lambda *ignored: heard.append(1))
    prefilled(decoder)
    assert heard


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_computes_by_itself(copied_by: Callable[[Any], Any]) -> None:
    decoder = new_case("llama", "float32").decoder
    prefilled(decoder)
    assert isinstance(swapped_by(decoder.layers[0]), FusedDecoderLayer)
    copied = copied_by(decoder.model)
    assert type(copied.model.layers[0]) is own_class(decoder.layers[0])
    assert swapped_by(copied.model.layers[0]) is None
    ids = torch.tensor([IDS])
    with torch.inference_mode(), decoder.plain_attention():
        copied.set_attn_implementation("sdpa")
        assert torch.equal(copied(ids).logits, decoder.model(ids).logits)


def test_few_rows_have_a_crew_where_all_their_products_are_our_own(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    """In addition to torch's threads, which wait spinning, a pool would only slow them down."""
    decoder = new_case("qwen2", "bfloat16").decoder
    prefilled(decoder)
    asked = calls_of(monkeypatch, decoder_module, "use_pool", lambda count: count)
    expected = prefilled(decoder)
    assert asked == [1, 1]
    monkeypatch.setattr(layer_cpu, "_is_in_team", lambda product, count, dtype: count < 30)
    torch.set_num_threads(2)
    found = prefilled(decoder)
    assert asked[2:] == [1, 2]
    LeadIn(decoder, IDS[:20])  # what is stored is computed by torch
    assert asked[4:] == [1]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
