"""Decoding of several sequences in one step, against each alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtool.core.common.progress import Events
from kvtool.core.model.decode import decode_backend, step_together
from kvtool.core.model.prompt_cache import PromptCache

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class TogetherRow:
    """Steps of so many sequences.

    Attributes
    ----------
    tokens_per_second : of all sequences. `gain`: that over a single one's.
    bytes_per_s : weights read once a step, and the cache of each; None where weights are read for each.
    copy_share : that of what a plain copy reads and writes.
    same_logits : whether each sequence's are those that it gets alone, bit by bit.
    """

    sequences: int
    tokens_per_second: float
    gain: float
    step_ms: float
    step_cpu_ms: float
    bytes_per_s: float | None
    copy_share: float | None
    same_logits: bool


class TogetherRun:
    """Steps of each number of sequences in turn, all behind prompts of one length.

    Parameters
    ----------
    filled : makes one cache more.
    counts : of sequences; one alone is always among them.
    """

    def __init__(self, decoder: Decoder, filled: Callable[[], PromptCache], counts: Sequence[int]) -> None:
        self._counts = sorted({1, *counts})
        self._caches = [filled() for _ in range(self._counts[-1])]
        self._steppers = [decode_backend(decoder, cache) for cache in self._caches]
        self._length = self._caches[0].buffers[0].length
        vocabulary = int(decoder.config.vocab_size)
        self._draw, self._vocabulary = torch.Generator().manual_seed(2), vocabulary
        self._times: dict[int, list[tuple[float, float]]] = {count: [] for count in self._counts}
        self._same = dict.fromkeys(self._counts, True)

    def all(self, steps: int, events: Events) -> None:
        """Compare the first step of each number with the sequences alone, then time them."""
        events.status("decode together")
        tokens = self._tokens()
        self._step(1, 0, tokens)  # the first that a process takes is of another kind
        alone = [self._step(1, place, tokens)[0] for place in range(len(self._steppers))]
        for count in self._counts:
            found = self._step(count, 0, tokens)
            self._same[count] = all(torch.equal(*pair) for pair in zip(found, alone[:count], strict=True))
        for number in range(steps):
            tokens = self._tokens()
            for count in self._counts:
                began, processor = time.perf_counter(), time.process_time()
                self._step(count, number, tokens)
                self._times[count].append((time.perf_counter() - began, time.process_time() - processor))
            events.advance(1)

    def _tokens(self) -> list[int]:
        return torch.randint(self._vocabulary, (len(self._steppers),), generator=self._draw).tolist()

    def _step(self, count: int, first: int, tokens: Sequence[int]) -> list[torch.Tensor]:
        """A step of so many sequences, from one on, behind prompts that are as long as before."""
        places = [(first + place) % len(self._steppers) for place in range(count)]
        for place in places:
            self._caches[place].set_length(self._length)
        return step_together([self._steppers[place] for place in places], [tokens[place] for place in places])

    def rows(self, weights_bytes: int | None, kv_bytes: int, memcpy: float) -> tuple[TogetherRow, ...]:
        """What was measured; `weights_bytes`: None where they are read for each sequence."""
        medians = {count: _medians(times) for count, times in self._times.items()}
        single = medians[1][0]
        rows = []
        for count, (step, processor) in medians.items():
            rate = None if weights_bytes is None else (weights_bytes + count * kv_bytes) / step
            rows.append(
                TogetherRow(
                    sequences=count,
                    tokens_per_second=count / step,
                    gain=count * single / step,
                    step_ms=step * 1e3,
                    step_cpu_ms=processor * 1e3,
                    bytes_per_s=rate,
                    copy_share=None if rate is None else rate / (2 * memcpy),
                    same_logits=self._same[count],
                )
            )
        return tuple(rows)


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return wall, processor
