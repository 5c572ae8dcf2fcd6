"""Models of known sizes with random weights, and stores filled with their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvtool.core.cache.store import Store
from kvtool.core.model.decoder import Decoder
from samples.benchmarks.bench.prompts import BenchPrompt, Sizes, filled_store, prompt_of, random_text
from samples.benchmarks.bench.shapes import build_shape
from samples.benchmarks.gpu_day.day import Day
from tests.families import tiny_tokenizer

SEED = 0
SMALL = ("tiny",)
SHAPES = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-14b")
CONTEXTS = (4096, 16384, 65536)
CHUNK_TOKENS = 512


def shapes(day: Day) -> tuple[str, ...]:
    return SMALL if day.dry else SHAPES


def contexts(day: Day) -> tuple[int, ...]:
    return (300,) if day.dry else CONTEXTS


def decoder(day: Day, shape: str, dtype: str = "bfloat16") -> Decoder:
    """Make a decoder with the tests' tokenizer of 512 tokens, since a passage or two are tokenised on the way."""
    loaded = build_shape(shape, day.device, "float32" if day.dry else dtype, SEED)
    return Decoder(replace(loaded, tokenizer=tiny_tokenizer()))


@contextmanager
def stored(day: Day, of: Decoder, context: int, level: str) -> Iterator[tuple[Store, BenchPrompt, Path]]:
    """A store on the scratch disk with one prompt's chunks, the prompt (at most the model's longest), and where."""
    length = min(context, of.context)
    sizes = Sizes((length,), 64 if day.dry else CHUNK_TOKENS, 32)
    text = random_text(of.config.vocab_size, sizes, SEED)
    prompt = prompt_of(of, text, level, length)
    with TemporaryDirectory(prefix="kvtool-gpu-", dir=day.scratch) as folder:
        path = Path(folder) / "store"
        with filled_store(path, of, text, [prompt], SEED) as store:
            yield store, prompt, path
