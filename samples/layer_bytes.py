"""What kinds of layers store and read: KV bytes a token, and the records that a prompt's passes read.

    python samples/layer_bytes.py [--context 4096] [--chunk-tokens 512] [SHAPE …]

Each shape of `kvtool bench --shape` is built with its own layers, heads and windows, and a body (hidden size, MLP,
experts, vocabulary) that is small: what is kept of a token does not depend on it. Prompts are prefilled and fused by
the engine; bytes are those of raw records of 16-bit numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvtool.core.cache.identity import ids_digest
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.source import MemorySource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.load import Loaded
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.shapes import SHAPES, shape_config

VOCABULARY, QUESTION = 512, 32
SMALL: dict[str, int] = {
    **{"hidden_size": 64, "intermediate_size": 64, "vocab_size": VOCABULARY, "moe_intermediate_size": 16},
    **{"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
}
LEFT_OUT = ("tiny",)
BYTES = 2  # of a number in a raw record


def small(name: str) -> Decoder:
    """A shape's layers around a small body, with random weights."""
    config = shape_config(name)
    for setting, value in SMALL.items():
        if getattr(config, setting, None) is not None:
            setattr(config, setting, value)
    for setting in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, setting, None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    files: Any = None
    return Decoder(Loaded(model, None, files, "cpu", "float32", name, 0.0))


def prompt(decoder: Decoder, context: int, chunk: int) -> tuple[Plan, dict[bytes, ChunkKV]]:
    """A prefix and chunks of so many tokens, each prefilled alone, and a question."""
    draw = random.Random(0)
    texts = [tuple(draw.randrange(VOCABULARY) for _ in range(chunk)) for _ in range(context // chunk)]
    kept = prefill_chunks(decoder, LeadIn(decoder, ()), [PrefillItem(ids) for ids in texts])
    chunks = {ids_digest(ids): kv for ids, kv in zip(texts, kept, strict=True)}
    first, *others = (Candidate(ids, ids_digest(ids), ids_digest(()), "raw") for ids in texts)
    return build_plan(first, others, [draw.randrange(VOCABULARY) for _ in range(QUESTION)]), chunks


def read(decoder: Decoder, plan: Plan, chunks: dict[bytes, ChunkKV], selector: Selector) -> int:
    """Bytes of the records that a pass reads."""
    fused = fuse(decoder, plan, selector, MemorySource(chunks))
    tokens = [sum(len(segment.ids) for segment in layer) for layer in fused.reach.read]
    return sum(BYTES * shape.numbers * count for shape, count in zip(decoder.shapes, tokens, strict=True))


def row(name: str, context: int, chunk: int) -> str:
    """A shape's line of the table."""
    decoder = small(name)
    plan, chunks = prompt(decoder, context, chunk)
    windows = [kind.window for kind in decoder.kinds]
    seen = sorted({window for window in windows if window})
    kinds = f"{sum(not window for window in windows)} full"
    kinds += "".join(f", {windows.count(window)} of {window}" for window in seen)
    kinds += ", latents" if decoder.shapes[0].joint else ""
    token = BYTES * sum(shape.numbers for shape in decoder.shapes)
    whole = token * len(plan.mask("hit", "exact").nonzero())
    shares = [read(decoder, plan, chunks, selector) / whole for selector in (Reuse(), Union(0.15))]
    cells = [name, kinds, f"{token:,}", f"{whole / 1e6:.1f}", *(f"{share:.2f}" for share in shares)]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=[name for name in SHAPES if name not in LEFT_OUT])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    print("| shape | layers | bytes a token | MB of the prompt | `reuse` reads | `union` 15 % reads |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.shapes:
        print(row(name, options.context, options.chunk_tokens), flush=True)


if __name__ == "__main__":
    main()
