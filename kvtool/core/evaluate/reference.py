"""Reference answer for other runs: the distance of another cache's distributions from the reference's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.fusion.engine import Fused
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Generated, Sampling, first_token, generate

_ROWS = 16  # of a vocabulary that are float64 at one time


@dataclass(frozen=True, slots=True)
class Distance:
    kl_first: float  # KL divergence in nats of the first token's distribution, D(reference ‖ run)
    kl_answer: float  # the same, as the mean over all tokens of the script
    first_agrees: bool  # whether the most probable first token is the same
    agreement: float  # the share of the script's tokens that are the most probable ones of the run, too

    def to_json(self) -> dict[str, Any]:
        return {"kl_first": self.kl_first, "kl_answer": self.kl_answer, "top1_agrees": self.first_agrees}


SAME = Distance(0.0, 0.0, True, 1.0)


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy answer, and the distributions before each token of its script: its tokens and the end token."""

    decoder: Decoder
    answer: Generated
    logits: torch.Tensor  # float32 `[len(script), vocabulary]`
    best: Sequence[int]  # the most probable token of each

    @classmethod
    def of(cls, decoder: Decoder, fused: Fused, answer: Generated) -> Reference:
        logits = forced_logits(decoder, fused, answer.script)
        return cls(decoder, answer, logits, logits.argmax(-1).tolist())

    @classmethod
    def answered(cls, decoder: Decoder, fused: Fused, max_tokens: int) -> Reference:
        sampling = Sampling.greedy(max_tokens)
        answer = generate(decoder, fused.cache, first_token(fused.logits, sampling), sampling)
        return cls.of(decoder, fused, answer)

    def force(self, fused: Fused) -> Forced:
        logits = forced_logits(self.decoder, fused, self.answer.script)
        best = logits.argmax(-1).tolist()
        divergence = kl_of_logits(self.logits, logits)
        agreed = [own == wanted for own, wanted in zip(best, self.best, strict=True)]
        first, mean = float(divergence[0]), float(divergence.mean())
        return Forced(self, fused, best, Distance(first, mean, agreed[0], sum(agreed) / len(agreed)))


@dataclass(frozen=True, slots=True)
class Forced:
    """A run that was led through its reference's script; `best` is its own most probable token before each."""

    reference: Reference
    fused: Fused
    best: Sequence[int]
    distance: Distance

    def answer(self, max_tokens: int) -> Generated:
        """The run's own greedy answer; tokens that agree with the reference's are not generated again."""
        script = self.reference.answer.script
        agreed = next((n for n, (own, said) in enumerate(zip(self.best, script, strict=True)) if own != said), None)
        if agreed is None:
            return self.reference.answer
        fused, decoder = self.fused, self.reference.decoder
        fused.cache.set_length(fused.plan.length + agreed)
        first, *more = [*script[:agreed], self.best[agreed]]
        return generate(decoder, fused.cache, first, Sampling.greedy(max_tokens), more=more)


def forced_logits(decoder: Decoder, fused: Fused, script: Sequence[int]) -> torch.Tensor:
    """Compute the logits before each token of `script`, float32 `[len(script), vocabulary]`, over a fused cache.

    An answer may have grown the cache; the rows up to the prompt's end are still those of the fusion.
    """
    fused.cache.set_length(fused.plan.length)
    if len(script) < 2:
        return fused.logits[None]
    return torch.cat([fused.logits[None], decoder.extend(script[:-1], fused.cache)])


def kl_of_logits(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute the KL divergence of each row in nats, D(p ‖ q), float64 `[rows]`; both logits, `[rows, vocabulary]`.

    A few rows at a time: in float64 those of a long answer and a large vocabulary are gigabytes.
    """
    rows = []
    for pair in zip(p.split(_ROWS), q.split(_ROWS), strict=True):
        log_p, log_q = (logits.double().log_softmax(-1) for logits in pair)
        rows.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(rows)
