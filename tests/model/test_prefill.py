"""Chunks prefilled after a lead-in, against plain `transformers`."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.model.forward import Forward
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from tests.fusion.making import BOS, CHUNKS, NAMES, PREFIX, QUESTION, Ids, case, new_case, plain_rows, tokens
from tests.spying import calls_of


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


def test_shapes() -> None:
    decoder = case("llama").decoder
    kvs = prefill_chunks(decoder, LeadIn(decoder, PREFIX), [PrefillItem(ids) for ids in CHUNKS])
    for ids, kv in zip(CHUNKS, kvs, strict=True):
        shape = (decoder.shapes[0].heads, len(ids), decoder.shapes[0].key_dim)
        assert [(keys.shape, values.shape) for keys, values in kv.layers] == [(shape, shape)] * 4
        assert kv.dtype == decoder.dtype


def test_the_lead_in_is_computed_once_and_the_lm_head_never(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = case("llama").decoder
    lead_in = LeadIn(decoder, PREFIX)
    rows = calls_of(monkeypatch, Forward, "fill", lambda forward, one: len(one.ids))
    heads = calls_of(monkeypatch, Forward, "logits")
    prefill_chunks(decoder, lead_in, [PrefillItem(CHUNKS[1]), PrefillItem(CHUNKS[3])])
    assert rows == [len(CHUNKS[1]) + len(CHUNKS[3])]  # no padding
    assert heads == []


def test_the_lead_in_is_left_as_it_is() -> None:
    decoder = case("llama").decoder
    lead_in = LeadIn(decoder, PREFIX)
    before = [side.clone() for layer in lead_in.layers for side in layer]
    prefill_chunks(decoder, lead_in, [PrefillItem(ids) for ids in CHUNKS])
    assert all(map(torch.equal, before, [side for layer in lead_in.layers for side in layer]))
    assert len(lead_in) == len(PREFIX)


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


def test_kv_bytes() -> None:
    decoder = case("llama").decoder
    (kv,) = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(CHUNKS[0])])
    assert decoder.kv_bytes(len(CHUNKS[0])) == kv.nbytes
