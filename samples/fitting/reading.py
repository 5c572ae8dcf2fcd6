"""The questions and answers of a prompt, read over given rows with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from fitting.prompts import Prompt, Rows
from kvtool.core.model.modules import cache_name


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model makes of a prompt's questions and answers.

    Attributes
    ----------
    hidden : the input of every layer, and what the LM head takes: `[tokens of all questions, hidden]` each.
    log_p : of each question, before each token of its answer: `[answer, vocabulary]`, float32.
    """

    hidden: list[torch.Tensor]
    log_p: list[torch.Tensor]


def read(prompt: Prompt, rows: Rows, temperature: torch.Tensor | float = 1.0) -> Reading:
    """Read all questions of a prompt at once, each alone behind the rows; padding stands on the right."""
    decoder = prompt.decoder
    texts = [[*question, *answer[:-1]] for question, answer in zip(prompt.questions, prompt.answers, strict=True)]
    longest, start = max(map(len, texts)), rows[0][0].shape[2]
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    positions = torch.arange(start, start + longest).expand(len(texts), -1)
    cache = held(rows, len(texts))
    with decoder.plain_attention():
        states = decoder.base(
            ids, position_ids=positions, use_cache=True, output_hidden_states=True, **{cache_name(decoder.base): cache}
        ).hidden_states
    real = torch.tensor([[place < len(text) for place in range(longest)] for text in texts])
    head: Any = decoder.loaded.model.get_output_embeddings()
    log_p = []
    for number, (question, answer) in enumerate(zip(prompt.questions, prompt.answers, strict=True)):
        asked = states[-1][number, len(question) - 1 : len(question) - 1 + len(answer)]
        log_p.append((head(asked).float() * temperature).log_softmax(-1))
    return Reading([state[real].float() for state in states], log_p)


def held(rows: Rows, batch: int) -> DynamicCache:
    """The rows as a cache of `transformers`."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(rows):
        cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), layer)
    return cache


def kl_answers(teacher: Reading, student: Reading) -> torch.Tensor:
    """KL of each answer in nats, mean over its tokens."""
    pairs = zip(teacher.log_p, student.log_p, strict=True)
    return torch.stack([(wanted.exp() * (wanted - got)).sum(-1).mean() for wanted, got in pairs])


def hidden_error(teacher: Reading, student: Reading) -> torch.Tensor:
    """Squared error of what the layers after the second take, in variances over the tokens, mean over layers."""
    errors = []
    for wanted, got in list(zip(teacher.hidden, student.hidden, strict=True))[2:-1]:
        spread = (wanted - wanted.mean(0)).square().sum(-1).clamp_min(1e-6)
        errors.append(((wanted - got).square().sum(-1) / spread).mean())
    return torch.stack(errors).mean()
