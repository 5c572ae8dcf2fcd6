"""A profile from a store's own chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.fit import default_groups, fit_profile
from kvtool.core.codec.profile import Profile
from kvtool.core.common.progress import Events
from kvtool.core.compress.fisher import CONTEXTS, probes, sensitivity
from kvtool.core.records.reading import exact_level, read_chunk, read_records
from kvtool.core.session.session import Session


def fit(session: Session, store: Store, sample: Sequence[tuple[bytes, str]], events: Events) -> Profile:
    """Fit a profile on chunks that are stored exactly, each given with the level that holds it so."""
    decoder, identity = session.decoder, session.identity
    layers = len(decoder.layers)
    chunks = [read_chunk(store, chunk, level, layers) for chunk, level in sample]
    infos = [store.chunk_info(chunk) for chunk, _ in sample]
    tokens = [info.token_ids if info is not None else () for info in infos]
    prefix_level = exact_level(store, identity.prefix_id) if identity.prefix else None
    prefix = read_chunk(store, identity.prefix_id, prefix_level, layers) if prefix_level else None
    prompts = probes(tokens, session.parts, decoder.loaded.tokenizer, CONTEXTS, seed=0)
    events.step("measure the sensitivity", len(prompts), "prompts")
    matters = sensitivity(decoder, prefix, chunks, prompts, events.advance)
    del chunks

    def sides(layer: int) -> torch.Tensor:
        parts = []
        for chunk, level in sample:
            keys, values = CODECS[level].decode(read_records(store, [chunk], level, layer), layer)[0]
            parts.append(torch.stack([keys, values]).transpose(1, 2).flatten(2).float())
        return torch.cat(parts, 1)

    events.step("fit the transform", layers, "layers")
    about = {"chunks": len(sample), "tokens": sum(map(len, tokens)), "prompts": len(prompts), "model": identity.model}
    groups = default_groups(decoder.kv_heads, decoder.head_dim)
    return fit_profile(sides, matters, groups, about, advance=events.advance)
