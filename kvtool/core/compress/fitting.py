"""The codec profile that a compression encodes with: fitted on the store's own chunks, or another store's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import wide_sides
from kvtool.core.codec.fit import default_groups, fit_profile
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Events
from kvtool.core.compress.fisher import fisher, probes
from kvtool.core.errors import DamagedError, KvtoolError, ModelError
from kvtool.core.records.encode import encoder_threads
from kvtool.core.records.read import exact_level, read_chunk, read_records, stored_shape
from kvtool.core.session.identity import ProfileCache, losses_by_maker, store_identity
from kvtool.core.session.session import Session


def fit(session: Session, sample: Sequence[tuple[bytes, str]], prompts: int, events: Events) -> Profile:
    """Fit a profile on chunks that are stored exactly, each given with the level that holds it so.

    Parameters
    ----------
    prompts : how many are made of the chunks, to measure what errors cost.
    """
    store, decoder, identity = session.store, session.decoder, session.identity
    layers = decoder.stored_layers
    chunks = [read_chunk(store, chunk, level, layers) for chunk, level in sample]
    infos = [store.chunk_info(chunk) for chunk, _ in sample]
    tokens = [info.token_ids if info is not None else () for info in infos]
    prefix_level = exact_level(store, identity.prefix_id) if identity.prefix else None
    prefix = read_chunk(store, identity.prefix_id, prefix_level, layers) if prefix_level else None
    made = probes(tokens, session.parts, session.tokenizer, prompts, seed=0)
    events.step("measure what errors cost", len(made), "prompts")
    information = fisher(decoder, prefix, chunks, made, events.advance)
    del chunks

    def sides(layer: int) -> torch.Tensor:
        """Read keys and values of all chunks, float32 `[2, tokens, C]`."""
        parts = []
        for chunk, level in sample:
            kv = CODECS[level].decode(read_records(store, [chunk], level, layer), layer)[0]
            parts.append(wide_sides(kv, decoder.channels).float())
        return torch.cat(parts, 1)

    events.step("fit the transform", layers, "layers")
    about = {"chunks": len(sample), "tokens": sum(map(len, tokens)), "prompts": len(made), "model": identity.model}
    groups = default_groups([stored_shape(shape, 0) for shape in decoder.shapes])
    with encoder_threads() as pool:
        return fit_profile(sides, information, groups, about, advance=events.advance, each=pool.map)


def profile_of(path: Path, fingerprint: str) -> Profile:
    """Take the profile of another store of the same model.

    Raises
    ------
    ModelError : it is another model's.
    KvtoolError : it has none.
    """
    with Store.open(path) as other:
        if store_identity(other).fingerprint != fingerprint:
            raise ModelError(f"the store at {path} is another model's", "fit a profile here with --fit")
        profile = ProfileCache(other).current()
    if profile is None:
        raise KvtoolError(f"the store at {path} has no profile", "make one there with `kvtool compress`")
    return profile


def keep_profile(store: Store, writer: Writer, profile: Profile) -> None:
    """Make a profile the store's current one; what was measured with another one stays known."""
    state, digest = store.codec_state(), profile.digest.hex()
    if state.get("profile") != digest:
        state = state | {"profile": digest, "losses": losses_by_maker(state)}
    elif _has(store, profile):
        return
    writer.put_profile(profile.digest, profile.data, state)


def _has(store: Store, profile: Profile) -> bool:
    try:
        return store.profile(profile.digest) is not None
    except DamagedError:
        return False
