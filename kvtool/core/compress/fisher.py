"""Fisher information of cached keys and values: how much errors in them matter, measured on the model itself.

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

from kvtool.core.common.types import Ids
from kvtool.core.compress.gradients import Asked, gradients, without_weight_gradients
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.model.prompt import PromptParts, question_tokens

CHUNKS_AT_ONCE = 4
_TOGETHER = 4  # prompts of a pass: fewer, and reading the weights takes as long as the products
SPAN, ANSWER = 32, 16  # tokens of a copied question, and of what follows it in the chunk
_LEAST_TOKENS = 8


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
    prefix, chunks : stored KV.
    advance : told after each prompt.

    Returns
    -------
    float32 `[2, layers, C, C]`, C = `decoder.channels`: the mean over the chunks' tokens.
    """
    size = decoder.channels
    total = torch.zeros((2 * decoder.stored_layers, size, size), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    before = [] if prefix is None else [prefix]
    lead = sum(part.tokens for part in before)
    tokens = 0
    with without_weight_gradients(decoder):
        for first in range(0, len(prompts), _TOGETHER):
            some = prompts[first : first + _TOGETHER]
            asked = [_asked([*before, *(chunks[number] for number in prompt.chunks)], prompt) for prompt in some]
            for one, found in zip(asked, gradients(decoder, asked, draw), strict=True):
                _add_information(total, found[:, :, lead:].cpu(), 1 / (one.said + 1))
                tokens += one.cached - lead
                advance(1)
    return total.view(decoder.stored_layers, 2, size, size).transpose(0, 1) / max(1, tokens)


def _asked(cached: Sequence[ChunkKV], prompt: Probe) -> Asked:
    layers = [
        (torch.cat([keys for keys, _ in kvs], 1), torch.cat([values for _, values in kvs], 1))
        for kvs in zip(*(part.layers for part in cached), strict=True)
    ]
    return Asked(layers, (*prompt.question, *prompt.answer), len(prompt.answer))


def _add_information(total: torch.Tensor, gradients: torch.Tensor, weight: float) -> None:
    """Add g gᵀ over tokens: of `[layers, 2, tokens, C]`, to `[layers * 2, C, C]`.

    A few tokens have gradients a hundred times as large as all others, and are what a loss comes from: where they were
    shortened to the 98th percentile of their context, SmolLM2 lost more at the same size; on Qwen2.5-0.5B no
    difference was shown (samples/results/codec.md).
    """
    sides = gradients.flatten(0, 1)
    total.baddbmm_(sides.transpose(1, 2), sides, alpha=weight)
