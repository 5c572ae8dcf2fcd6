"""Text generation from a full prompt cache, token by token, of one answer or of several in a continuous batch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError, UsageError
from kvtool.core.model.constraint import Constraint
from kvtool.core.model.decode import decode_backend, step_along, step_together
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.options import SamplingOptions
from kvtool.core.model.prompt import stop_texts
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.tokens import OnText, TextStream

Finish = Literal["stop", "length", "repeat"]
LogProb = tuple[int, float]
"""A token and its log-probability."""
_COLD = 1e-6  # chances of less are those of the largest logit, or no numbers


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of an answer's tokens: greedy at temperature 0, else by seeded sampling. Biases, penalties and the
    temperature do not change the noted log-probabilities."""

    options: SamplingOptions
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()  # none of them is chosen before `min_tokens`
    # Each answer of a batch has its own random numbers.
    draw: torch.Generator = field(default_factory=torch.Generator, repr=False, compare=False)
    said: list[int] = field(default_factory=list, repr=False, compare=False)  # the tokens chosen so far
    # Each of them with its log-probability, and those of the most likely ones.
    noted: list[tuple[LogProb, list[LogProb]]] = field(default_factory=list, repr=False, compare=False)
    constraint: Constraint | None = field(default=None, repr=False, compare=False)

    @classmethod
    def greedy(cls, max_tokens: int) -> Sampling:
        return cls(SamplingOptions(max_tokens=max_tokens, stop_repeats=False))


@dataclass(frozen=True, slots=True)
class Generated:
    text: str
    ids: Ids  # without the end token, and without those of a repetition that ended it
    end: int | None  # the end token; None where the answer was cut off at its longest, or ended by a text
    milliseconds: float  # after the first token
    steps: int = 0  # tokens computed in that time
    stepper: str = ""  # the backend, with the reason where it is not machine code
    stop: str | None = None  # the text that ended it
    finish: Finish = "stop"  # a text or the caller's end is a stop, too

    @property
    def script(self) -> Ids:
        return self.ids if self.end is None else (*self.ids, self.end)


def stop_ids(decoder: Decoder) -> set[int]:
    config = decoder.model.generation_config
    stated = config.eos_token_id if config is not None else None
    ids = set(stated) if isinstance(stated, list) else {stated}
    ids.add(getattr(decoder.loaded.tokenizer, "eos_token_id", None))
    return {token for token in ids if isinstance(token, int)}


def first_token(logits: torch.Tensor, sampling: Sampling) -> int:
    """Choose the first answer token from logits `[vocabulary]`; seeds what later ones draw from. See `next_token`."""
    sampling.said.clear()
    sampling.noted.clear()
    if sampling.constraint is not None:
        sampling.constraint.begin()
    if sampling.options.temperature > 0:
        sampling.draw.manual_seed(sampling.options.seed)
    return next_token(logits, sampling)


def next_token(logits: torch.Tensor, sampling: Sampling) -> int:
    possible = logits if sampling.constraint is None else sampling.constraint.masked(logits)
    token = _chosen(adjusted(possible, sampling), sampling)
    if sampling.constraint is not None:
        sampling.constraint.take(token)
    if sampling.options.top_logprobs is not None:
        log_p = logits.float().log_softmax(-1)
        values, ids = log_p.topk(sampling.options.top_logprobs)
        best = list(zip(ids.tolist(), values.tolist(), strict=True))
        sampling.noted.append(((token, float(log_p[token])), best))
    sampling.said.append(token)
    return token


def adjusted(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits `[vocabulary]` after the biases and penalties of tokens, as OpenAI's API reference has them:

        logit[j] + bias[j] - count[j] * frequency_penalty - (count[j] > 0) * presence_penalty

    `count[j]` is how often the answer has token `j` so far. The logits are those after the repetition penalty of Keskar
    et al. 2019, "CTRL", section 4.1, which divides positive ones and multiplies negative ones; of the answer's tokens
    only, since an answer should repeat the words of its passages.
    """
    options, added = sampling.options, sampling.options.biases
    if options.frequency_penalty or options.presence_penalty:
        for token, count in Counter(sampling.said).items():
            added[token] = added.get(token, 0.0) - count * options.frequency_penalty - options.presence_penalty
    if options.repetition_penalty != 1 and sampling.said:
        start = 0 if options.repeat_last_n < 0 else max(0, len(sampling.said) - options.repeat_last_n)
        recent = torch.tensor(sampling.said[start:], dtype=torch.long, device=logits.device)
        logits, penalty = logits.float().clone(), options.repetition_penalty
        logits[recent] = torch.where(logits[recent] > 0, logits[recent] / penalty, logits[recent] * penalty)
    if len(sampling.said) < options.min_tokens:
        added |= dict.fromkeys(sampling.ends, -math.inf)
    if not added:
        return logits
    if (strange := max(added)) >= len(logits):
        raise UsageError(f"logit_bias names token {strange}, and the model has {len(logits):,}", "ids count from 0")
    ids = torch.tensor([*added], device=logits.device)
    return logits.float().index_add(0, ids, torch.tensor([*added.values()], device=logits.device))


def likely(chances: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Zero the chances `[vocabulary]` that `sampled_tokens`, `top_p` and `min_p` rule out, in this order; one stays."""
    if 0 < options.sampled_tokens < len(chances):
        largest, ids = chances.topk(options.sampled_tokens)
        chances = torch.zeros_like(chances).index_copy_(0, ids, largest / largest.sum())
    if options.top_p < 1:
        chances = nucleus(chances, options.top_p)
    return chances * (chances >= options.min_p * chances.max()) if options.min_p else chances


def nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the fewest most likely tokens whose chances `[vocabulary]` sum up to `top_p`; one always stays.
    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1."""
    ordered, ids = chances.sort(descending=True, stable=True)
    is_kept = ordered.cumsum(0) - ordered < top_p
    is_kept[0] = True
    return torch.zeros_like(chances).index_copy_(0, ids[is_kept], ordered[is_kept])


def _chosen(logits: torch.Tensor, sampling: Sampling) -> int:
    best = int(logits.argmax())
    if not math.isfinite(most := float(logits[best])):  # the prompt's cache has overflowed
        raise ModelError(
            "the model gives no finite numbers over this prompt, so there is no answer",
            "--fusion full asks without what is stored; numbers that overflow there, too, need --dtype float32",
        )
    if sampling.options.temperature < _COLD:
        return best
    chances = likely(torch.softmax((logits - most) / sampling.options.temperature, -1).cpu(), sampling.options)
    return int(torch.multinomial(chances, 1, generator=sampling.draw))


def generate(
    decoder: Decoder,
    cache: PromptCache,
    first: int,
    sampling: Sampling,
    on_text: OnText | None = None,
    more: Sequence[int] = (),
    going: Callable[[], bool] = lambda: True,
) -> Generated:
    """Continue a prompt whose first answer token is known, and `more` after it (`greedy_prefix`). The cache holds
    exactly the rows of the prompt and of the known tokens but the last. If `going` returns False before a further
    token, the answer ends there."""
    sequence = AnswerSequence(decoder, cache, [first, *more], sampling, on_text)
    while not sequence.done and going():
        sequence.take(sequence.backend.step(sequence.token))
    return sequence.end()


class AnswerSequence:
    """An answer that is being generated, by its own backend or in a `ContinuousBatch`. The cache holds exactly the rows
    of the prompt and of the known tokens but the last, which is `token`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PromptCache,
        head: Sequence[int],
        sampling: Sampling,
        on_text: OnText | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._sampling, self._known, self._steps = sampling, len(head), 0
        self._error: Exception | None = None
        tokenizer = decoder.loaded.tokenizer
        stops = (*sampling.stop, *stop_texts(tokenizer))
        self._text = TextStream(tokenizer, stop_ids(decoder), on_text, stops, sampling.options.stop_repeats)
        for self.token in head:
            self._text.add(self.token)
        self.backend = decode_backend(decoder, cache)

    @property
    def done(self) -> bool:
        return self._is_full or self._text.ended or self._error is not None

    @property
    def _is_full(self) -> bool:
        return self._known + self._steps >= self._sampling.options.max_tokens

    def take(self, logits: torch.Tensor) -> None:
        self.token = next_token(logits, self._sampling)
        self._steps += 1
        self._text.add(self.token)

    def fail(self, error: Exception) -> None:
        self._error = error

    def end(self) -> Generated:
        """Return the answer as it is now, and pass the rest of its text to `on_text`; raise the error that ended it."""
        if self._error is not None:
            raise self._error
        text, backend = self._text, self.backend
        text.end()
        milliseconds = (time.perf_counter() - self._started) * 1e3
        how = f"{backend.name}: {backend.why}" if backend.why else backend.name
        cut: Finish = "length" if self._is_full and not text.ended else "stop"
        finish: Finish = "repeat" if text.repeated else cut
        return Generated(
            text.text, tuple(text.ids), text.ended_by, milliseconds, self._steps, how, text.stopped_by, finish
        )


class ContinuousBatch:
    """Answers that are generated together; they are added and removed between any two steps.

        batch = ContinuousBatch()
        batch.add(AnswerSequence(decoder, fused.cache, [first], sampling, on_text))
        while batch.sequences:
            for sequence in batch.step():
                answer = sequence.end()

    An answer does not depend on the others of its batch: it is what `generate` gives, token by token. In machine code
    all run in one step, which reads the model's weights once for all of them, and every logit is the same to the last
    bit; elsewhere they run one by one.

    One thread steps; where others use the model meanwhile, it holds the session's lock for a step, not for an answer.
    """

    def __init__(self) -> None:
        self.sequences: list[AnswerSequence] = []

    def add(self, sequence: AnswerSequence) -> None:
        self.sequences.append(sequence)

    def remove(self, sequence: AnswerSequence) -> None:
        self.sequences.remove(sequence)

    def step(self) -> list[AnswerSequence]:
        """Generate a token of every answer that lacks one; return and remove those that are done. An error of one
        answer ends that one, an error of the step all that took part: their `end` raises it."""
        going = [sequence for sequence in self.sequences if not sequence.done]
        try:
            logits = step_together([sequence.backend for sequence in going], [sequence.token for sequence in going])
        except Exception as error:
            for sequence in going:
                sequence.fail(error)
        else:
            for sequence, row in zip(going, logits, strict=True):
                try:
                    sequence.take(row)
                except Exception as error:  # the others of the batch go on
                    sequence.fail(error)
        done = [sequence for sequence in self.sequences if sequence.done]
        self.sequences = [sequence for sequence in self.sequences if not sequence.done]
        return done


@dataclass(frozen=True, slots=True)
class GreedyPrefix:
    """The first greedy tokens of an answer, an end token among them, and the log-probability of each."""

    ids: Ids
    log_p: tuple[float, ...]


def greedy_prefix(decoder: Decoder, cache: PromptCache, logits: torch.Tensor, most: int) -> GreedyPrefix:
    """Compute at most `most` first greedy tokens of an answer; `generate` continues from them. The cache holds exactly
    the prompt's rows, and grows by all tokens but the last."""
    backend, stops = decode_backend(decoder, cache), stop_ids(decoder)
    ids: list[int] = []
    log_p: list[float] = []
    while True:
        ids.append(int(logits.argmax()))
        log_p.append(float(logits.double().log_softmax(-1)[ids[-1]]))
        if len(ids) >= most or ids[-1] in stops:
            return GreedyPrefix(tuple(ids), tuple(log_p))
        logits = backend.step(ids[-1])


def follow(
    decoder: Decoder, cache: PromptCache, logits: torch.Tensor, script: Sequence[int], sampling: Sampling
) -> list[int]:
    """Choose tokens as `generate` would, as long as they are those of `script`. The rows are those of single steps, bit
    by bit. Returns those that agree, and the first other one, if any; the cache grows by all of them but the last."""
    start, ids = cache.buffers[0].length, [first_token(logits, sampling)]
    rows = step_along(decode_backend(decoder, cache), script[:-1])
    while len(ids) < len(script) and ids[-1] == script[len(ids) - 1]:
        ids.append(next_token(next(rows), sampling))
    cache.set_length(start + len(ids) - 1)
    return ids
