"""Generation from a fused prompt cache, token by token, by `transformers`' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

OnText = Callable[[str], None]


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
    """

    text: str
    ids: Ids
    end: int | None
    milliseconds: float

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


def first_token(logits: torch.Tensor, sampling: Sampling) -> int:
    """Choose the first answer token from logits `[vocabulary]`."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    torch.manual_seed(sampling.seed)
    return int(torch.multinomial(torch.softmax(logits / sampling.temperature, -1), 1))


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    cache: PromptCache,
    first: int,
    sampling: Sampling,
    on_text: OnText | None = None,
    more: Sequence[int] = (),
) -> Generated:
    """Continue a prompt whose cache is full and whose first answer token is known.

    Parameters
    ----------
    prompt : the prompt's token ids; `cache` holds exactly their rows.
    on_text : called with each new piece of answer text.
    more : tokens behind the first that are known, too (`begin`); `cache` then holds the rows of all but the last.
    """
    started = time.perf_counter()
    stops = stop_ids(decoder)
    known = [first, *more]
    text = _TextStream(decoder.loaded.tokenizer, stops, on_text)
    for token in known:
        text.add(token)
    if text.ended_by is None and sampling.max_tokens > len(known):
        sampled = sampling.temperature > 0
        options = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
        left = sampling.max_tokens - len(known)
        _continue(decoder, [*prompt, *known], cache, left, do_sample=sampled, streamer=text, **options)
    text.end()
    return Generated(text.text, tuple(text.ids), text.ended_by, (time.perf_counter() - started) * 1e3)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The greedy beginning of an answer: its token ids, an end token among them, and the log-probability of each."""

    ids: Ids
    log_p: tuple[float, ...]


def begin(decoder: Decoder, prompt: Sequence[int], cache: PromptCache, logits: torch.Tensor, most: int) -> Beginning:
    """Compute the first greedy tokens of an answer, at most `most`; `generate` goes on from them.

    Parameters
    ----------
    prompt : the prompt's token ids; `cache` holds exactly their rows, and grows by all tokens but the last.
    logits : of the prompt's last token, `[vocabulary]`.
    """
    ids, rows = [int(logits.argmax())], [logits]
    if most > 1 and ids[0] not in stop_ids(decoder):
        more = _continue(
            decoder, [*prompt, *ids], cache, most - 1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids += more.sequences[0, len(prompt) + 1 :].tolist()
        rows += [row[0] for row in more.logits]
    log_p = [float(row.double().log_softmax(-1)[token]) for row, token in zip(rows, ids, strict=True)]
    return Beginning(tuple(ids), tuple(log_p))


def _continue(decoder: Decoder, ids: list[int], cache: PromptCache, count: int, **options: Any) -> Any:
    """Let `transformers` generate at most `count` tokens; `cache` holds the rows of all ids but the last."""
    tokens = torch.tensor([ids], device=decoder.device)
    stops = stop_ids(decoder)
    with torch.inference_mode():
        return decoder.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=count,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
            **options,
        )


class _TextStream(BaseStreamer):
    """Turns token ids into text as they come; holds back a character whose bytes are not all there yet."""

    def __init__(self, tokenizer: Any, stops: set[int], on_text: OnText | None) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._on_text = on_text
        self._prompt_seen = False
        self._shown = 0
        self.ids: list[int] = []
        self.text = ""
        self.ended_by: int | None = None

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # `generate` streams its input first
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self.add(token)

    def add(self, token: int) -> None:
        if token in self._stops:
            self.ended_by = token
            return
        self.ids.append(token)
        self.text = self._tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not self.text.endswith("�"):
            self._show()

    def end(self) -> None:
        """Show what is left, without the first bytes of a character that never came."""
        self.text = self.text.rstrip("\ufffd")
        self._show()

    def _show(self) -> None:
        if self._on_text is not None and len(self.text) > self._shown:
            self._on_text(self.text[self._shown :])
        self._shown = len(self.text)
