"""Decoding of several sequences in one step, against a single one: each number of them in turn, token by token.

    python samples/benchmarks/decoding.py --sequences 2,4,8
    python samples/benchmarks/decoding.py --shape qwen2.5-0.5b --context 512

Prompts are random tokens of one length. The model is smollm2 unless --model or --shape names another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.cli.out import Out
from kvtool.core.checkpoint.files import PACKAGED
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.common.types import Events
from kvtool.core.kernels.linear.modules import pack_weights
from kvtool.core.model.decode import decode_backend, step_together
from kvtool.core.model.decode.native import compiled_model
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from samples.benchmarks.bench.decode import DecodeOptions, filled_cache
from samples.benchmarks.bench.machine import copied_bytes_per_s
from samples.benchmarks.bench.shapes import build_shape
from samples.benchmarks.script import Parser, parser, run, several, whole

HEAD = ("sequences", "tokens/s", "of one", "ms", "CPU ms", "of a copy's", "as alone")


@dataclass(frozen=True, slots=True)
class TogetherRow:
    """Steps of so many sequences.

    Attributes
    ----------
    tokens_per_second : of all sequences. `gain`: that over a single one's.
    bytes_per_s : weights read once a step, and the cache of each; None where weights are read for each.
    copy_share : that of what a plain copy reads and writes.
    same_logits : whether each sequence's are those that it gets in a batch of one, bit by bit.
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
    """Steps of each number of sequences in turn, all after prompts of one length.

    Parameters
    ----------
    filled : makes one cache more.
    counts : of sequences; 1 is always among them.
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
        """Compare the first step of each number with each sequence's own step, then time them."""
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
        """Run a step of so many sequences, from number `first` on, after prompts that are as long as before."""
        places = [(first + place) % len(self._steppers) for place in range(count)]
        for place in places:
            self._caches[place].set_length(self._length)
        return step_together([self._steppers[place] for place in places], [tokens[place] for place in places])

    def rows(self, weights_bytes: int | None, kv_bytes: int, memcpy: float) -> tuple[TogetherRow, ...]:
        """Return a row for each number of sequences; `weights_bytes`: None if they are read for each sequence."""
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


def arguments() -> Parser:
    made = parser(__doc__)
    made.add_argument("--sequences", type=several(whole), default=(2, 4, 8), metavar="N,N", help="beside one alone")
    made.add_argument("--model", default=PACKAGED)
    made.add_argument("--shape", metavar="NAME", help="random weights of this model's size")
    made.add_argument("--context", type=whole, default=512, metavar="N", help="tokens of each prompt")
    made.add_argument("--new-tokens", type=whole, default=20, metavar="N", help="steps")
    made.add_argument("--threads", type=whole, metavar="N")
    made.add_argument("--dtype", default="auto")
    return made


@torch.inference_mode()
def measure(given: argparse.Namespace, out: Out) -> None:
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    decoder = loaded(given)
    options = DecodeOptions(given.context, given.new_tokens, ("native",))
    together = TogetherRun(decoder, partial(filled_cache, decoder, options), given.sequences)
    together.all(given.new_tokens, Events())
    compiled = compiled_model(decoder)
    read = None if isinstance(compiled, str) else compiled.weights_bytes
    rows = together.rows(read, decoder.kv_bytes(given.context), copied_bytes_per_s())
    out.result({"together": [asdict(row) for row in rows]}, human=lambda: out.table(HEAD, map(cells, rows)))


def loaded(given: argparse.Namespace) -> Decoder:
    if given.shape is None:
        return Decoder(load_model(resolve(given.model), device="cpu", dtype=given.dtype, packed=True))
    made = build_shape(given.shape, "cpu", given.dtype)
    pack_weights(made.model)
    return Decoder(made)


def cells(row: TogetherRow) -> tuple[str, ...]:
    share = "-" if row.copy_share is None else f"{row.copy_share:.2f}"
    same = "bit by bit" if row.same_logits else "nearly"
    rates = (f"{row.tokens_per_second:.1f}", f"{row.gain:.2f}", f"{row.step_ms:.2f}", f"{row.step_cpu_ms:.2f}")
    return (str(row.sequences), *rates, share, same)


def main(given: Sequence[str] | None = None) -> int:
    return run(arguments(), given, measure)


if __name__ == "__main__":
    sys.exit(main())
