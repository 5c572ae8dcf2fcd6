"""Fit of the codec's profile on a store's chunks, by the Fisher information of cached keys and values.

A few chunks are laid out as in a prompt, their stored KV as leaves of a graph; a question and an answer, both copied
from one of the chunks, read them. For tokens drawn from the model's own distribution the mean of g gᵀ, g being the
gradient of their log-probability with respect to one token's keys (or values), is the Fisher information: half of
e @ F @ e is the divergence, in nats, that an error e causes to second order. So one unit holds in all layers.

Several prompts are packed into one row, as chunks are in a prefill; each sees its own cached keys and values and its
own rows. So weights are read once for all of them, and products have rows enough to be fast.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import DynamicCache

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import LayerKV, wide_sides
from kvtool.core.codec.fit import default_groups, fit_profile
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Events, Ids
from kvtool.core.errors import DamagedError, KvtoolError, ModelError
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import Pass
from kvtool.core.model.hf.modules import cache_name, joined, running
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.model.prompt import PromptParts, question_tokens
from kvtool.core.model.prompt_cache import LayerKind
from kvtool.core.records.encode import encoder_threads
from kvtool.core.records.read import exact_level, read_chunk, read_records, stored_shape
from kvtool.core.session.identity import ProfileCache, store_identity
from kvtool.core.session.session import Session

CHUNKS_AT_ONCE = 4
_TOGETHER = 4  # prompts of a pass: fewer, and reading the weights takes as long as the products
SPAN, ANSWER = 32, 16  # tokens of a copied question, and of what follows it in the chunk
_LEAST_TOKENS = 8


def fit(session: Session, sample: Sequence[tuple[bytes, str]], prompts: int, events: Events) -> Profile:
    """Fit a profile on chunks that are stored exactly, each given with the level that holds it so."""
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
    if rope := decoder.rotary.by_halves:
        about["rope"] = rope  # for KV whose keys are rotated (kvtool/lmcache.py)
    groups = default_groups([stored_shape(shape, 0) for shape in decoder.shapes])
    with encoder_threads() as pool:
        return fit_profile(sides, information, groups, about, advance=events.advance, each=pool.map)


def profile_of(path: Path, fingerprint: str) -> Profile:
    """Take the profile of another store of the same model. Raises ModelError or KvtoolError."""
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
    with suppress(DamagedError):
        if state.get("profile") == digest and store.profile(profile.digest) is not None:
            return
    writer.put_profile(profile.digest, profile.data, state | {"profile": digest})


@dataclass(frozen=True, slots=True)
class Probe:
    chunks: tuple[int, ...]
    question: Ids
    answer: Ids


def probes(
    tokens: Sequence[Sequence[int]], parts: PromptParts, tokenizer: object, count: int, seed: int
) -> list[Probe]:
    draw = random.Random(seed)
    usable = [number for number, ids in enumerate(tokens) if len(ids) >= _LEAST_TOKENS]
    made = []
    for _ in range(count if usable else 0):
        chunks = draw.sample(usable, min(CHUNKS_AT_ONCE, len(usable)))
        ids = tokens[draw.choice(chunks)]
        cut = draw.randrange(len(ids) // 4, len(ids) * 3 // 4) or 1
        span = tokenizer.decode(list(ids[max(0, cut - SPAN) : cut]))  # type: ignore[attr-defined]
        question = question_tokens(tokenizer, span, parts)
        made.append(Probe(tuple(chunks), tuple(question), tuple(ids[cut : cut + ANSWER])))
    return made


def fisher(
    decoder: Decoder,
    prefix: ChunkKV | None,
    chunks: Sequence[ChunkKV],
    prompts: Sequence[Probe],
    advance: Callable[[int], None] = lambda prompts: None,
) -> torch.Tensor:
    """Measure the mean Fisher information of un-rotated keys and of values, float32 `[2, layers, C, C]`: the sum of
    g gᵀ over tokens.

    A few tokens have gradients a hundred times as large as all others, and are what a loss comes from: where they were
    shortened to the 98th percentile of their context, SmolLM2 lost more at the same size; on Qwen2.5-0.5B no
    difference was shown (samples/results/codec.md).
    """
    size = decoder.channels
    total = torch.zeros((2 * decoder.stored_layers, size, size), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    before = [] if prefix is None else [prefix]
    lead = sum(part.tokens for part in before)
    tokens = 0
    decoder.model.requires_grad_(False)  # gradients reach keys and values only
    for first in range(0, len(prompts), _TOGETHER):
        some = prompts[first : first + _TOGETHER]
        asked = [_asked([*before, *(chunks[number] for number in prompt.chunks)], prompt) for prompt in some]
        for one, found in zip(asked, gradients(decoder, asked, draw), strict=True):
            sides = found[:, :, lead:].cpu().flatten(0, 1)
            total.baddbmm_(sides.transpose(1, 2), sides, alpha=1 / (one.scored + 1))
            tokens += one.cached - lead
            advance(1)
    return total.view(decoder.stored_layers, 2, size, size).transpose(0, 1) / max(1, tokens)


def _asked(cached: Sequence[ChunkKV], prompt: Probe) -> CachedPrompt:
    layers = [
        (torch.cat([keys for keys, _ in kvs], 1), torch.cat([values for _, values in kvs], 1))
        for kvs in zip(*(part.layers for part in cached), strict=True)
    ]
    return CachedPrompt(layers, (*prompt.question, *prompt.answer), len(prompt.answer))


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    layers: Sequence[LayerKV]  # keys, un-rotated, and values of that beginning, `[kv_heads, tokens, head_dim]` each
    ids: Ids  # the rest
    scored: int  # number of last tokens whose predictions, and the one after them, gradients are taken of

    @property
    def cached(self) -> int:
        return self.layers[0][0].shape[1]


def gradients(decoder: Decoder, prompts: Sequence[CachedPrompt], draw: torch.Generator) -> list[torch.Tensor]:
    """The gradients, one a prompt, of the log-chances of tokens drawn from the model's own distribution.

    One token is drawn at each row that is heard: the mean of the outer products over draws is the Fisher information.
    Each is float32 `[layers, 2, tokens, C]`, of un-rotated keys and of values.
    """
    tables = [decoder.rotary.table(torch.arange(prompt.cached, device=decoder.device)) for prompt in prompts]
    leaves = [_leaves(decoder, prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    rows = _Rows.of(prompts, leaves, decoder.kinds)
    with torch.enable_grad():
        logits = _logits(decoder, prompts, rows)
        wanted = [side for prompt in leaves for layer in prompt for side in layer]
        found = torch.autograd.grad(logits, wanted, _pull(logits.detach(), draw))
    layers = decoder.stored_layers
    parts = [found[first : first + 2 * layers] for first in range(0, len(found), 2 * layers)]
    return [_unrotated(decoder, part, table) for part, table in zip(parts, tables, strict=True)]


def _leaves(decoder: Decoder, prompt: CachedPrompt, table: RopeTables) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys, rotated, and values of each layer `[kv_heads, tokens, head_dim]`, in the model's dtype."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, (keys, values) in enumerate(prompt.layers):
        placed = decoder.rotary.rotate(keys[None].to(decoder.device), table, layer)[0]
        placed, values = (side.to(decoder.device, decoder.dtype).detach().clone() for side in (placed, values))
        made.append((placed.requires_grad_(), values.requires_grad_()))
    return made


def _logits(decoder: Decoder, prompts: Sequence[CachedPrompt], rows: _Rows) -> torch.Tensor:
    """float32 `[rows, vocabulary]`: at the rows before and on each of the scored tokens."""
    device = decoder.device
    positions = [torch.arange(prompt.cached, prompt.cached + len(prompt.ids)) for prompt in prompts]
    kept = [torch.arange(stop - prompt.scored - 1, stop) for (_, stop), prompt in zip(rows.spans, prompts, strict=True)]
    ids = torch.tensor([token for prompt in prompts for token in prompt.ids], device=device)
    one = Pass(ids, rows, torch.cat(positions).to(device), None)
    with running(one):
        out = decoder.model(
            one.ids[None],
            position_ids=one.positions[None],
            use_cache=True,
            logits_to_keep=torch.cat(kept).to(device),
            **{cache_name(decoder.base): DynamicCache()},
        )
    logits: torch.Tensor = out.logits[0].float()
    return logits


def _pull(logits: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    chances = torch.softmax(logits, -1)
    lot = torch.rand((len(chances), 1), generator=draw, dtype=torch.float32).to(chances)
    scored = torch.searchsorted(chances.cumsum(-1), lot).clamp_max_(chances.shape[-1] - 1)
    return (-chances).scatter_add_(1, scored, torch.ones_like(lot))


def _unrotated(decoder: Decoder, found: Sequence[torch.Tensor], table: RopeTables) -> torch.Tensor:
    """Gradients of keys as they are before rotation: what a rotation's transpose makes of them."""
    back = table.transposed()
    sides = []
    for layer in range(decoder.stored_layers):
        keys, values = (side.float() for side in found[2 * layer : 2 * layer + 2])
        keys = decoder.rotary.rotate(keys[None], back, layer)[0]
        sides.append(wide_sides((keys, values), decoder.channels))
    return torch.stack(sides)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Attends for prompts side by side, each over its own cached keys and values; gradients pass."""

    spans: tuple[tuple[int, int], ...]
    cached: Sequence[Sequence[LayerKV]]
    sources: Sequence[int]

    @classmethod
    def of(
        cls, prompts: Sequence[CachedPrompt], cached: Sequence[Sequence[LayerKV]], kinds: Sequence[LayerKind]
    ) -> _Rows:
        stops = list(accumulate(len(prompt.ids) for prompt in prompts))
        sources = [layer if kind.source is None else kind.source for layer, kind in enumerate(kinds)]
        return cls(tuple(zip([0, *stops[:-1]], stops, strict=True)), cached, sources)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: AttentionParams
    ) -> torch.Tensor:
        parts = []
        for (start, stop), cached in zip(self.spans, self.cached, strict=True):
            before, values = cached[self.sources[layer]]
            if before.shape[2] != key.shape[3]:
                before = joined(values, before)
            keys = torch.cat([before, key[0, :, start:stop]], 1)
            values = torch.cat([values, value[0, :, start:stop]], 1)
            parts.append(_attended(query[0, :, start:stop], keys, values, scoring))
        return torch.cat(parts, 1)[None]


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: AttentionParams) -> torch.Tensor:
    """Attend with the last rows of a causal attention, `[heads, rows, head_dim]`; keys and values of fewer heads."""
    heads, rows, _ = query.shape
    kv_heads, seen = keys.shape[:2]
    weights = attention_weights(
        query, keys, KeyRanges.run(range(seen - rows, seen), scoring.window, query.device), scoring
    )
    return torch.bmm(weights.to(values.dtype).view(kv_heads, -1, seen), values).view(heads, rows, -1)
