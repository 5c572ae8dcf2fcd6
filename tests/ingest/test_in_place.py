"""Raw records made in the memory that a pass puts keys and values in."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import decode_record
from kvtool.core.model.prefill import LeadIn
from kvtool.core.records.encode import LeadIns, PrefilledChunk, encode, prefill
from tests.families import tiny_model
from tests.fusion.making import CHUNKS, PREFIX, Case, decoder_of, new_case
from tests.pretended import pretended

BEFORE = ((), PREFIX, ())  # tokens of a chunk's own before it, which are not stored


def made_of(own: Case) -> list[PrefilledChunk]:
    pairs = zip(CHUNKS, BEFORE, strict=False)
    chunks = [ChunkSpec(bytes([number]) * ID_BYTES, *pair, b"") for number, pair in enumerate(pairs)]
    return prefill(own.decoder, LeadIns(LeadIn(own.decoder, PREFIX), None), chunks)


@pytest.mark.parametrize("name", ["llama", "youtu", "gemma4-shared"])
def test_they_are_the_bytes_of_a_copy(name: str) -> None:
    made = made_of(new_case(name))
    assert len({one.kv.tokens for one in made}) > 1
    copied = [encode(one) for one in made]
    placed = [encode(one, in_place=True) for one in made]
    assert [[*map(bytes, one.layers)] for one in placed] == [one.layers for one in copied]
    assert all(isinstance(record, memoryview) and record.readonly for one in placed for record in one.layers)
    for one, record in ((one, record) for one, records in zip(made, placed, strict=True) for record in records.layers):
        decode_record(one.chunk.chunk_id, record)
        with pytest.raises(TypeError):
            record[0] = 0


@pytest.mark.parametrize("name", ["llama", "youtu", "gemma4-shared"])
def test_a_gpu_brings_what_a_cpu_computes(name: str) -> None:
    """One copy a layer, or one a side and chunk: each number is in its place, and none comes late."""
    wanted = made_of(new_case(name))
    with pretended():
        made = made_of(Case(name, "float32", decoder_of(tiny_model(name), "cuda")))
        records = [encode(one, in_place=True) for one in made]
    for near, far, own in zip(wanted, made, records, strict=True):
        for layer, record in enumerate(own.layers):
            header, payload = decode_record(near.chunk.chunk_id, record)
            assert (header.layer, header.tokens) == (layer, near.kv.tokens)
            stored = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            sides = [kv.layers[layer] for kv in (near.kv, far.kv)]
            for keys, values in sides:
                flat = torch.cat([keys.flatten(), values.flatten()])
                torch.testing.assert_close(stored, flat, atol=1e-4, rtol=1e-4)
