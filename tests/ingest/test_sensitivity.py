"""The sensitivity kept at ingest, against plain `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_tokenizer
from kvtool.core.model.prompt import PromptParts, lead_in_ids
from kvtool.core.session.identity import StoreIdentity
from tests.cli.working import CHUNKS, kvtool, write_corpus


def values_behind(model: Any, lead_in: tuple[int, ...], ids: tuple[int, ...]) -> torch.Tensor:
    """Values of layer 1, `[kv_heads, tokens, head_dim]`."""
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([[*lead_in, *ids]]), past_key_values=cache, use_cache=True)
    return cache.layers[1].values[0, :, len(lead_in) :]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mode", "other"), [("warm", "prefix"), ("prefix", "warm"), ("neighbour", "warm"), ("none", "warm")]
)
def test_it_is_the_distance_between_two_lead_ins(mode: str, other: str, tiny: Path, tmp_path: Path) -> None:
    asked = ("--store", tmp_path / "s", "--model", tiny, "--lead-in", mode, "--store-dtype", "float32", *CHUNKS)
    kvtool("ingest", write_corpus(tmp_path / "in", 2), *asked).fine()
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(resolve(str(tiny)))
    with Store.open(tmp_path / "s") as store:
        identity = StoreIdentity.from_manifest(store.manifest())
        parts = PromptParts(identity.prefix, identity.answer_header)
        for chunk, before in chunks_of(store, identity):
            info = store.chunk_info(chunk)
            kept = torch.frombuffer(bytearray(info.sensitivity), dtype=torch.float16).float()
            own = values_behind(model, (*identity.lead_in.ids, *before), info.token_ids)
            behind = values_behind(model, lead_in_ids(other, tokenizer, parts), info.token_ids)
            wanted = (own - behind).square().sum((0, 2)).sqrt()
            assert wanted.max() > 0
            assert torch.allclose(kept, wanted, rtol=2e-3, atol=1e-5)


def chunks_of(store: Store, identity: StoreIdentity) -> list[tuple[bytes, tuple[int, ...]]]:
    """Ids of a store's chunks, each with the token ids between the shared lead-in and it."""
    found: list[tuple[bytes, tuple[int, ...]]] = []
    for document in store.documents():
        before: tuple[int, ...] = ()
        for ref in document.chunks:
            info = store.chunk_info(ref.chunk_id)
            found.append((ref.chunk_id, before))
            before = info.token_ids if identity.lead_in.mode == "neighbour" else ()
    return found
