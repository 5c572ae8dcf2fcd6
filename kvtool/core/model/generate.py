"""Generation from a fused prompt cache, token by token, by `transformers`' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

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
    """An answer: its text, its token ids without the end token, that end token (None: the answer was cut off at
    its longest), and the time after the first token in ms."""

    text: str
    ids: tuple[int, ...]
    end: int | None
    milliseconds: float


def stop_ids(decoder: Decoder) -> set[int]:
    """Ids that end an answer."""
    config = decoder.model.generation_config
    found = config.eos_token_id if config is not None else None
    ids = set(found) if isinstance(found, list) else {found}
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
) -> Generated:
    """Continue a prompt whose cache is full and whose first answer token is known.

    Parameters
    ----------
    prompt : the prompt's token ids; `cache` holds exactly their rows.
    on_text : called with each new piece of answer text.
    """
    started = time.perf_counter()
    stops = stop_ids(decoder)
    text = _TextStream(decoder.loaded.tokenizer, stops, on_text)
    text.add(first)
    if first not in stops and sampling.max_tokens > 1:
        _continue(decoder, [*prompt, first], cache, sampling, stops, text)
    text.end()
    return Generated(text.text, tuple(text.ids), text.ended_by, (time.perf_counter() - started) * 1e3)


def _continue(
    decoder: Decoder, ids: list[int], cache: PromptCache, sampling: Sampling, stops: set[int], text: _TextStream
) -> None:
    tokens = torch.tensor([ids], device=decoder.device)
    sampled = sampling.temperature > 0
    options: dict[str, Any] = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
    with torch.inference_mode():
        decoder.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=sampling.max_tokens - 1,
            do_sample=sampled,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
            streamer=text,
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
        """The last tokens may be the first bytes of a character that never came."""
        self.text = self.text.rstrip("\ufffd")
        self._show()

    def _show(self) -> None:
        if self._on_text is not None and len(self.text) > self._shown:
            self._on_text(self.text[self._shown :])
        self._shown = len(self.text)
