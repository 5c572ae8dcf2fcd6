"""What kinds of layers store: KV bytes a token.

    python samples/tools/layer_bytes.py [--context 4096] [SHAPE …]
    python samples/tools/layer_bytes.py --write     puts the table of all shapes into samples/results/scale.md

Each shape of `samples.benchmarks.bench` is built with its own layers, heads and windows, and a body (hidden size, MLP,
experts, vocabulary) that is small: what is kept of a token does not depend on it. Bytes are those of raw records of
16-bit numbers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvtool.core.checkpoint.load import Loaded
from kvtool.core.model.decoder import Decoder
from samples.benchmarks.bench.shapes import SHAPES, shape_config

PAGE = Path(__file__).resolve().parents[1] / "results" / "scale.md"
VOCABULARY = 512
SMALL: dict[str, int] = {
    **{"hidden_size": 64, "intermediate_size": 64, "vocab_size": VOCABULARY, "moe_intermediate_size": 16},
    **{"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "top_k_experts": 1},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
}
LEFT_OUT = ("tiny", "gpt-oss-20b-6")  # which no one publishes
BYTES = 2  # of a number in a raw record
ALL = "all"
HEAD = """| shape | layers | bytes a token | MB of the prompt | modes |
| --- | --- | --- | --- | --- |"""
_TABLE = re.compile(r"\| shape \| layers \|.*?\n(?=\n)", re.DOTALL)


def small(name: str) -> Decoder:
    """A shape's layers around a small body, with random weights."""
    config = shape_config(name)
    for setting, value in SMALL.items():
        if getattr(config, setting, None):
            setattr(config, setting, value)
    for setting in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, setting, None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    files: Any = None
    return Decoder(Loaded(model, None, files, "cpu", "float32", name, 0.0))


def kept(decoder: Decoder) -> int:
    """Bytes that raw records have of a token; states left aside."""
    return BYTES * sum(shape.numbers for shape in decoder.shapes)


def row(name: str, context: int) -> str:
    """A shape's line of the table."""
    decoder = small(name)
    windows = [kind.window for kind in decoder.kinds]
    seen = sorted({window for window in windows if window})
    kinds = f"{sum(not window for window in windows)} full"
    kinds += "".join(f", {windows.count(window)} of {window}" for window in seen)
    kinds += ", latents" if decoder.shapes[0].joint else ""
    token = kept(decoder)
    assert not decoder.keeps_states, f"the chunks of {name} are not fused: say which modes it has"
    cells = [name, kinds, f"{token:,}", f"{token * context / 1e6:.1f}", ALL]
    return f"| {' | '.join(cells)} |"


def table(shapes: Sequence[str], context: int) -> Iterator[str]:
    yield HEAD
    for name in shapes:
        yield row(name, context)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=[name for name in SHAPES if name not in LEFT_OUT])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="put the table into samples/results/scale.md")
    options = parser.parse_args(arguments)
    lines = table(options.shapes, options.context)
    if options.write:
        whole = "\n".join(lines) + "\n"
        PAGE.write_text(_TABLE.sub(lambda _: whole, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")
        return
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
