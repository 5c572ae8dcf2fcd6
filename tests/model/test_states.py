"""Models that keep states: what their caches hold."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from kvtool.core.errors import ModelError
from kvtool.core.model.decode import decode_backend
from kvtool.core.model.hf.states import NothingLayer, StateAndRowsLayer, StateCache, StateLayer
from kvtool.core.model.prompt_cache import BufferLayer
from tests.families import SHAPE, tiny_model
from tests.fusion.making import decoder_of, tokens
from tests.wording import refused

HELD = {
    "qwen3-next": [StateLayer, StateLayer, StateLayer, BufferLayer],
    "lfm2": [StateLayer, BufferLayer, StateLayer, BufferLayer],
    "nemotron-h": [StateLayer, NothingLayer, BufferLayer, NothingLayer],
    "falcon-h1": [StateAndRowsLayer] * 4,
}


@pytest.mark.parametrize("name", HELD)
def test_a_layer_holds_what_it_keeps(name: str) -> None:
    decoder = decoder_of(tiny_model(name))
    _, cache = decoder.prefill(tokens(9, 1), reserve=4)
    assert isinstance(cache, StateCache)
    assert [type(layer) for layer in cache.buffers] == HELD[name]
    for layer in cache.buffers:
        if isinstance(layer, BufferLayer):
            assert layer.keys.shape[2] == 13
            assert layer.get_seq_length() == 9
    assert "keeps states" in decode_backend(decoder, cache).why
    decoder.extend(tokens(30, 2), cache)  # more than fits
    assert cache.length == 39


def test_a_state_that_is_kept_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateLayer, "states", lambda layer: {})
    with refused(ModelError):
        decoder_of(tiny_model("lfm2"))


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    config = t.MiniMaxConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    with torch.random.fork_rng(devices=[]):
        model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ModelError):
        decoder_of(model)
