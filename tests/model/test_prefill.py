"""Chunks prefilled after a lead-in, against plain `transformers`."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.errors import DamagedError
from kvtool.core.model.forward import Forward
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from tests.families import VOCAB, tiny_model
from tests.fusion.making import (
    BOS,
    CHUNKS,
    NAMES,
    PREFIX,
    QUESTION,
    Ids,
    case,
    decoder_of,
    new_case,
    plain_rows,
    tokens,
)
from tests.spying import calls_of
from tests.wording import refused


@pytest.mark.parametrize("lead_in", [(), BOS, PREFIX, tokens(100, 40)], ids=["none", "bos", "prefix", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_a_plain_prefill(name: str, lead_in: Ids) -> None:
    decoder = case(name).decoder
    chunk = CHUNKS[1]
    (kv,) = prefill_chunks(decoder, LeadIn(decoder, lead_in), [PrefillItem(chunk)])
    table = decoder.rotary.table(torch.arange(len(lead_in), len(lead_in) + len(chunk)))
    for layer, (keys, values) in enumerate(plain_rows(name, "float32", (*lead_in, *chunk), len(lead_in))):
        moved = decoder.rotary.rotate(kv.keys[layer][None], table, layer)
        torch.testing.assert_close(moved, keys, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(kv.values[layer][None], values, atol=2e-4, rtol=1e-4)


def test_the_lead_in_is_computed_once_and_the_lm_head_never(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = case("llama").decoder
    lead_in = LeadIn(decoder, PREFIX)
    rows = calls_of(monkeypatch, Forward, "fill", lambda forward, one: len(one.ids))
    heads = calls_of(monkeypatch, Forward, "logits")
    prefill_chunks(decoder, lead_in, [PrefillItem(CHUNKS[1]), PrefillItem(CHUNKS[3])])
    assert rows == [len(CHUNKS[1]) + len(CHUNKS[3])]  # no padding
    assert heads == []


@pytest.mark.parametrize("room", [0, 1, 50])
def test_extending_a_full_cache(room: int) -> None:
    """More rows after a prefill, with space reserved or not: what one prefill of all gives."""
    decoder = new_case("qwen3").decoder
    ids = (*PREFIX, *CHUNKS[1])
    _, cache = decoder.prefill(ids, reserve=room)
    logits = decoder.extend(QUESTION, cache)
    whole, _ = decoder.prefill((*ids, *QUESTION))
    assert logits.shape == (len(QUESTION), 512)
    torch.testing.assert_close(logits[-1], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_the_model_does_not_know_is_told(token: int) -> None:
    """As a damaged store may give one: a GPU would end the process for it."""
    decoder = decoder_of(tiny_model("llama"), "cpu")
    with refused(DamagedError, numbers=True):
        decoder.prefill([1, token, 3])
    with refused(DamagedError, numbers=True):
        prefill_chunks(decoder, LeadIn(decoder, [1]), [PrefillItem((1, token))])
