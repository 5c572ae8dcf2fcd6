"""Rows of the fused layers are the model's own, and an unknown layer runs the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.layer_cpu import FusedDecoderLayer, install_fused_layers
from kvtool.core.model.modules import swapped_by
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
