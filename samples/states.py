"""Two questions over the same documents to a model that keeps states: what the second one computes, reads and takes.

    python samples/states.py [SHAPE …] [--tokens N] [--chunks N]

The models have random weights: how long a computation takes does not depend on what they are. Each runs through a store
on disk, as a query does; the first question's stretches are written after its answer, and read by the second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.checkpoint.load import Loaded, quiet
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.prefix_cache import PrefixFused, fuse_prefix
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.state_checkpoint import StoredPrefix, encode_part
from kvtool.core.model.decoder import Decoder

_SPREAD = 0.02
_VOCABULARY = 8192  # of all shapes: an LM head's time is the same in every mode
_QUESTION = 24  # tokens
_PREFIX = 64


def _qwen3_5(hidden: int, layers: int, heads: int, mlp: int, value_heads: int) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        vocab_size=_VOCABULARY,
        linear_num_key_heads=value_heads // 2,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128 if hidden > 64 else 16,
        linear_value_head_dim=128 if hidden > 64 else 16,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4),
        max_position_embeddings=32768,
    )


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        hidden_size=768,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_local_experts=0,
        vocab_size=_VOCABULARY,
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 2,
        max_position_embeddings=32768,
    )


def _lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=6656,
        vocab_size=_VOCABULARY,
        layer_types=[("conv", "conv", "full_attention")[number % 3] for number in range(16)],
        max_position_embeddings=32768,
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": lambda: _qwen3_5(64, 4, 4, 128, 4),
    "qwen3.5-like": lambda: _qwen3_5(1024, 24, 8, 3584, 16),
    "granite-4-like": _granite,
    "lfm2-350m-like": _lfm2,
}


@dataclass(frozen=True)
class Row:
    """One question: tokens computed and reused, bytes read, milliseconds to the first token (median), and CPU time."""

    name: str
    computed: int
    reused: int
    bytes_read: int
    ms: float
    cpu_ms: float


def build(name: str) -> Decoder:
    """A model of a shape, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.float32)
    model.eval().requires_grad_(False)
    return Decoder(Loaded(model, None, ModelFiles(name, Path(), "shape"), "cpu", "float32", f"shape {name}", 0.0))


def plan(chunks: int, tokens: int, question: int) -> Plan:
    """A prompt of so many chunks, the same for every question."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(8, _VOCABULARY, (_PREFIX + chunks * tokens,), generator=draw, dtype=torch.int64).tolist()
    starts = range(_PREFIX, len(ids), tokens)
    cut = [Candidate(tuple(ids[start : start + tokens]), bytes([number]) * 20) for number, start in enumerate(starts)]
    asked = torch.randint(8, _VOCABULARY, (_QUESTION,), generator=draw.manual_seed(question), dtype=torch.int64)
    return build_plan(Candidate(tuple(ids[:_PREFIX])), cut, asked.tolist())


def found(store: Store, prompt: Plan) -> StoredPrefix:
    """What the store has of a prompt."""
    names = tuple(bytes([number + 1]) * 20 for number in range(len(prompt.segments) - 1))
    return StoredPrefix(names, tuple(store.stretch(name) for name in names))


def keep(store: Store, chained: PrefixFused) -> float:
    """Write what is new; milliseconds."""
    started = time.perf_counter()
    with store.writer() as writer:
        for one in chained.new:
            writer.put_stretch(one.id, one.info, ((at, encode_part(tensors)) for at, tensors in one.parts.items()))
    return (time.perf_counter() - started) * 1e3


def measured(name: str, ask: Callable[[int], PrefixFused], times: int) -> tuple[Row, PrefixFused]:
    """A question asked so many times, with another text each time."""
    walls, cpus = [], []
    for number in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        done = ask(number)
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    tokens = done.fused.tokens
    row = Row(name, tokens.fresh, tokens.reused, done.fused.bytes_read, statistics.median(walls), min(cpus))
    return row, done


def run(shape: str, chunks: int, tokens: int, times: int) -> None:
    """Ask, write, ask again, and print the table."""
    decoder = build(shape)
    with (
        tempfile.TemporaryDirectory(prefix="kvtool-states-") as folder,
        Store.create_or_open(Path(folder) / "s") as store,
    ):
        nothing = StoredPrefix((), ())

        def full(number: int) -> PrefixFused:
            return fuse_prefix(decoder, plan(chunks, tokens, 100 + number), Full(), nothing, store.read_part)

        def prefix(number: int) -> PrefixFused:
            prompt = plan(chunks, tokens, 200 + number)
            return fuse_prefix(decoder, prompt, Prefix(), found(store, prompt), store.read_part)

        full(0)
        rows = [measured("full", full, times)[0]]
        first, done = measured("prefix, first question", prefix, 1)
        wrote = keep(store, done)
        second, again = measured("prefix, second question", prefix, times)
        off = float((again.fused.logits - full(100 + times - 1).fused.logits).abs().max())
        kept = store.stats()["stretches"]
    states = sum(t.nbytes for layer in again.fused.cache.state_layers for t in layer.states().values())  # type: ignore[attr-defined]
    print(
        f"\n{shape}: {sum(p.numel() for p in decoder.model.parameters()) / 1e6:,.0f} M parameters, prompt of "
        f"{done.fused.plan.length:,} tokens in {chunks} chunks; kept {kept['bytes'] / 1e6:,.1f} MB "
        f"(a state {states / 1e6:,.2f} MB, keys and values {decoder.kv_bytes(1) / 1e3:,.1f} kB a token), "
        f"written in {wrote:,.0f} ms after the answer; logits differ by {off:.1e}\n"
    )
    print("| question | tokens computed | reused | MB read | ms to the first token | CPU ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in (*rows, first, second):
        print(
            f"| {row.name} | {row.computed:,} | {row.reused:,} | {row.bytes_read / 1e6:,.1f} "
            f"| {row.ms:,.1f} | {row.cpu_ms:,.1f} |"
        )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--tokens", type=int, default=256, help="of a chunk (default: 256)")
    parser.add_argument("--chunks", type=int, default=8, help="of the prompt (default: 8)")
    parser.add_argument("--times", type=int, default=3, help="that a question is asked (default: 3)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for shape in asked.shapes or SHAPES:
        run(shape, asked.chunks, asked.tokens, asked.times)


if __name__ == "__main__":
    main(sys.argv[1:])
