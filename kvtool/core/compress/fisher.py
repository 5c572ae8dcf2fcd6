"""How much errors in cached keys and values matter, measured on the model itself.

A few chunks are laid out as in a prompt, their stored KV as leaves of a graph; a question and an answer, both copied
from one of the chunks, read them. For tokens drawn from the model's own distribution the mean of g gᵀ, g being the
gradient of their log-probability with respect to one token's keys (or values), is the Fisher information: half of
e @ F @ e is the divergence, in nats, that an error e causes to second order. So one unit holds in all layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.model.prompt import PromptParts, question_tokens

CHUNKS_AT_ONCE = 4
SPAN, ANSWER = 32, 16  # tokens of a copied question, and of what follows it in the chunk
_LEAST_TOKENS = 8
# A few tokens have gradients a hundred times as large as all others and would decide alone; they count as the 98th
# percentile of their context. Measured: a quarter fewer bits at the same loss.
_CLIP = 0.98


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt made of stored chunks: which, and a question and an answer that stand in one of them."""

    chunks: tuple[int, ...]
    question: Ids
    answer: Ids


def probes(
    tokens: Sequence[Sequence[int]], parts: PromptParts, tokenizer: object, count: int, seed: int
) -> list[Probe]:
    """Make prompts over chunks given by their token ids; they are the same for the same seed."""
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
    """Measure the Fisher information of un-rotated keys and of values.

    Parameters
    ----------
    prefix, chunks : stored KV, keys and values `[layers, kv_heads, tokens, head_dim]`.
    advance : told after each prompt.

    Returns
    -------
    float32 `[2, layers, C, C]`, C = kv_heads * head_dim: the mean over the chunks' tokens.
    """
    size = decoder.kv_heads * decoder.head_dim
    total = torch.zeros((2, len(decoder.layers), size, size))
    draw = torch.Generator().manual_seed(0)
    tokens = 0
    with decoder.plain_attention():
        for prompt in prompts:
            before = [] if prefix is None else [prefix]
            tokens += _add(decoder, before, [chunks[number] for number in prompt.chunks], prompt, draw, total)
            advance(1)
    return total / max(1, tokens)


def _add(
    decoder: Decoder,
    before: list[ChunkKV],
    chunks: list[ChunkKV],
    prompt: Probe,
    draw: torch.Generator,
    total: torch.Tensor,
) -> int:
    """Add one prompt's outer products. Returns the number of chunk tokens."""
    lead = sum(part.keys.shape[2] for part in before)
    keys = torch.cat([part.keys for part in (*before, *chunks)], 2).float().to(decoder.device)
    values = torch.cat([part.values for part in (*before, *chunks)], 2).float().to(decoder.device)
    length = keys.shape[2]
    table = decoder.rotary.table(torch.arange(length, device=decoder.device))
    ids = [*prompt.question, *prompt.answer]
    with torch.enable_grad():
        leaves = [side[layer][None].clone().requires_grad_() for layer in range(len(keys)) for side in (keys, values)]
        cache = DynamicCache()
        for layer in range(len(keys)):
            own_keys, own_values = leaves[2 * layer : 2 * layer + 2]
            rotated = decoder.rotary.rotate(own_keys, table, layer)
            cache.update(rotated.to(decoder.dtype), own_values.to(decoder.dtype), layer)
        positions = torch.arange(length, length + len(ids), device=decoder.device)
        out = decoder.model(
            torch.tensor([ids], device=decoder.device),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=len(prompt.answer) + 1,
        )
        chances = torch.log_softmax(out.logits[0].float(), -1)
        said = torch.multinomial(chances.detach().exp().cpu(), 1, generator=draw).to(decoder.device)
        gradients = torch.autograd.grad(chances.gather(1, said).sum(), leaves)
    for number, gradient in enumerate(gradients):
        rows = gradient[0, :, lead:].transpose(0, 1).reshape(length - lead, -1)
        total[number % 2, number // 2] += _outer(rows / len(chances) ** 0.5).cpu()
    return length - lead


def _outer(rows: torch.Tensor) -> torch.Tensor:
    """Sum up g gᵀ over rows, the longest rows shortened."""
    norms = rows.square().sum(1)
    most = norms.kthvalue(max(1, int(len(norms) * _CLIP))).values.clamp_min(1e-30)
    shortened = rows * (most / torch.maximum(norms, most)).sqrt()[:, None]
    return shortened.T @ shortened
