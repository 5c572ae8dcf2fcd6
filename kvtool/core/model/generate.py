"""Generation from a fused prompt cache, token by token: what is chosen, what is shown, and when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.stepping import stepper_for
from kvtool.core.model.stepping.engines import prepare

OnText = Callable[[str], None]

# Tokens that are turned into text again with every new one, and how many of them stay for the next ones to join on to:
# some tokenizers write a word's first token otherwise at the beginning of a text.
_WINDOW, _OVERLAP = 48, 8


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else by seeded sampling."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer.

    Attributes
    ----------
    ids : its token ids, without the end token.
    end : the end token; None where the answer was cut off at its longest.
    milliseconds : how long it took after the first token.
    steps : how many tokens were computed in that time. `stepper`: how, with the reason where it is not in machine code.
    """

    text: str
    ids: Ids
    end: int | None
    milliseconds: float
    steps: int = 0
    stepper: str = ""

    @property
    def script(self) -> Ids:
        """The ids, and behind them the end token if there is one."""
        return self.ids if self.end is None else (*self.ids, self.end)


def stop_ids(decoder: Decoder) -> set[int]:
    """The token ids that end an answer."""
    config = decoder.model.generation_config
    stated = config.eos_token_id if config is not None else None
    ids = set(stated) if isinstance(stated, list) else {stated}
    ids.add(getattr(decoder.loaded.tokenizer, "eos_token_id", None))
    return {token for token in ids if isinstance(token, int)}


def make_ready(decoder: Decoder) -> None:
    """Begin to make what `generate` decodes with, beside whatever comes next."""
    prepare(decoder)


def first_token(logits: torch.Tensor, sampling: Sampling) -> int:
    """Choose the first answer token from logits `[vocabulary]`; seeds what `next_token` draws from.

    Raises
    ------
    ModelError : the largest is no number: what stands in the prompt's cache has overflowed. Tokens that a model rules
        out have -inf.
    """
    if not math.isfinite(float(logits.max())):
        raise ModelError(
            "the model gives no finite numbers over this prompt, so there is no answer",
            "--fusion full asks without stored rows; rows that overflowed need a store of --dtype float32",
        )
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
    return next_token(logits, sampling)


def next_token(logits: torch.Tensor, sampling: Sampling) -> int:
    """Choose a token from logits `[vocabulary]`."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / sampling.temperature, -1), 1))


def generate(
    decoder: Decoder,
    cache: PromptCache,
    first: int,
    sampling: Sampling,
    on_text: OnText | None = None,
    more: Sequence[int] = (),
) -> Generated:
    """Continue a prompt whose cache is full and whose first answer token is known.

    Parameters
    ----------
    cache : holds exactly the prompt's rows, and those of the tokens that are known but the last.
    on_text : called with each new piece of answer text.
    more : tokens behind the first that are known, too (`begin`).
    """
    started = time.perf_counter()
    text = TextStream(decoder.loaded.tokenizer, stop_ids(decoder), on_text)
    known = [first, *more]
    for token in known:
        text.add(token)
    stepper, steps = stepper_for(decoder, cache), 0
    while text.ended_by is None and len(known) + steps < sampling.max_tokens:
        token = next_token(stepper.step(token), sampling)
        text.add(token)
        steps += 1
    text.end()
    milliseconds = (time.perf_counter() - started) * 1e3
    how = f"{stepper.name}: {stepper.why}" if stepper.why else stepper.name
    return Generated(text.text, tuple(text.ids), text.ended_by, milliseconds, steps, how)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The greedy beginning of an answer: its token ids, an end token among them, and the log-probability of each."""

    ids: Ids
    log_p: tuple[float, ...]


def begin(decoder: Decoder, cache: PromptCache, logits: torch.Tensor, most: int) -> Beginning:
    """Compute the first greedy tokens of an answer, at most `most`; `generate` goes on from them.

    Parameters
    ----------
    cache : holds exactly the prompt's rows, and grows by all tokens but the last.
    logits : of the prompt's last token, `[vocabulary]`.
    """
    stepper, stops = stepper_for(decoder, cache), stop_ids(decoder)
    ids: list[int] = []
    log_p: list[float] = []
    while True:
        ids.append(int(logits.argmax()))
        log_p.append(float(logits.double().log_softmax(-1)[ids[-1]]))
        if len(ids) >= most or ids[-1] in stops:
            return Beginning(tuple(ids), tuple(log_p))
        logits = stepper.step(ids[-1])


class TextStream:
    """Turns token ids into text as they come; holds back a character whose bytes are not all there yet."""

    def __init__(self, tokenizer: Any, stops: set[int], on_text: OnText | None) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._on_text = on_text
        self._shown = 0
        self._settled, self._start, self._known = "", 0, 0  # text that stays; tokens from here on; their text in it
        self.ids: list[int] = []
        self.text = ""
        self.ended_by: int | None = None

    def add(self, token: int) -> None:
        if token in self._stops:
            self.ended_by = token
            return
        self.ids.append(token)
        self.text = self._settled + self._window()[self._known :]
        if not self.text.endswith("�"):
            self._show()
            if len(self.ids) - self._start >= _WINDOW:
                self._settled, self._start = self.text, len(self.ids) - _OVERLAP
                self._known = len(self._window())

    def _window(self) -> str:
        """The text of the last tokens: that of all takes longer with every one, 0.4 ms for 600."""
        last = self.ids[self._start :]
        text: str = self._tokenizer.decode(last, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def end(self) -> None:
        """Show what is left, without the first bytes of a character that never came."""
        self.text = self.text.rstrip("\ufffd")
        self._show()

    def _show(self) -> None:
        if self._on_text is not None and len(self.text) > self._shown:
            self._on_text(self.text[self._shown :])
        self._shown = len(self.text)
