"""Attention over latents both ways: by absorbed queries, and by keys and values of every head; see `--help`.

One layer of DeepSeek-V2-Lite's widths with random weights. Rows are a prompt's last ones, or all of it. Both ways are
computed in turn, round after round, by one thread; the least time of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import IMPLEMENTATION, Rows
from kvtool.core.model.mla import Latents
from kvtool.lab.bench.shapes import shape_config

SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}


def attention_of(shape: str, dtype: torch.dtype) -> Any:
    """The attention of a shape's first layer."""
    config = shape_config(shape)
    config.update(SMALL | {"n_routed_experts": 2, "num_experts_per_tok": 1})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).model.layers[0].self_attn


def ways(latents: Latents, rows: Rows, keys: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """The same attention in both ways."""
    draw = torch.Generator().manual_seed(0)
    joint = torch.randn((1, 1, keys, latents.rank + latents.rotary), generator=draw).to(dtype)
    query = torch.randn((1, latents.heads, len(rows), latents.plain + latents.rotary), generator=draw).to(dtype)
    scoring = AttentionParams(query.shape[-1] ** -0.5)

    def absorbed() -> torch.Tensor:
        mixed = rows.attend(0, latents.absorbed(query), joint, joint[..., : latents.rank], scoring)
        return latents.unfolded(mixed)

    return {"absorbed": absorbed, "heads": lambda: rows.attend(0, query, *latents.heads_of(joint), scoring)}


def least(calls: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, by the thread's own clock."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first one compiles
        for name, call in calls.items():
            began = time.thread_time()
            call()
            found[name].append((time.thread_time() - began) * 1e3)
    return {name: min(taken[1:]) for name, taken in found.items()}


@torch.inference_mode()
def main() -> None:
    """Print a line for every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="deepseek-v2-lite")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--keys", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, options.dtype)
    latents, keys = Latents(attention_of(options.shape, dtype), IMPLEMENTATION), options.keys
    print(f"{'rows':>6} {'absorbed ms':>12} {'heads ms':>12}  taken     apart")
    for count in sorted({1, 32, keys // 8, keys // 4, keys // 2, keys}):
        rows = Rows.of(torch.arange(keys - count, keys), "cpu")
        calls = ways(latents, rows, keys, dtype)
        one, other = (call().float() for call in calls.values())
        took = least(calls, options.rounds)
        taken = "heads" if latents.should_expand(count, keys, rows.pairs) else "absorbed"
        apart = float((one - other).norm() / other.norm())
        print(f"{count:>6} {took['absorbed']:>12.1f} {took['heads']:>12.1f}  {taken:<9} {apart:.1e}")


if __name__ == "__main__":
    main()
